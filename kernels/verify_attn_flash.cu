// Verify attention for MLA in absorbed form, on mma.sync: one source from sm_80 to sm_120.
//
// Question   Can a kernel that fits the 99 KB of a consumer Blackwell block (sm_120) beat FlashInfer fa2, the one
//            peer that runs there, although it also takes a tree mask and page_size 1?
// Floor      max(KV bytes once / DRAM rate, 2 * rows * tokens * (576 + 512) / mma.sync rate).
// Idea       heads x nodes are the rows of one M tile: all of them attend to the same latent rows, so a row of
//            KV is fetched once per M tile and serves as key (576 columns) and as value (its first 512).
//            - Q stays in registers, once per block: the 8 warps split the key's columns four ways (72 registers
//              a thread at 64 rows), so shared memory holds nothing but KV stages. FlashInfer keeps Q there and
//              is left with one stage of 16 tokens on sm_120.
//            - The partial scores meet in a 24 KB exchange: each warp receives 8 rows x all tokens of the tile.
//              Row maxima and sums therefore need no second exchange.
//            - P goes back through the rope columns of the stage itself, which are dead once the scores exist.
//            - O (64 x 512 fp32) fills half the register file: a warp owns 64 columns and reads each value once.
//            - O is rescaled only when a row's maximum grows by more than 2^8: exact, as l carries the same scale.
//            - Partials leave in the query's dtype, normalised, with a base-2 LSE; a second kernel merges them,
//              or (-DFUSED_MERGE=1, one cooperative launch) the blocks of a row tile merge them together.
// Grid       (row tiles, nsplit, bs). Lengths are read on the device: one captured launch serves its bucket.
// Story, predictions and measured results: README.md beside this file.
//
// config m64: -DM_TILE=64 -DSTAGES=2 -DSHARED_BYTES=100608
// config m64_deep (sm_90a sm_100): -DM_TILE=64 -DSTAGES=4 -DSHARED_BYTES=174336
// config m64_wide (sm_90a): -DM_TILE=64 -DTOKENS=64 -DSTAGES=2 -DSHARED_BYTES=198912
// config m16_deep (sm_90a sm_100): -DM_TILE=16 -DSTAGES=4 -DSHARED_BYTES=156416
// config m32: -DM_TILE=32 -DSTAGES=2 -DSHARED_BYTES=91392
// config m16: -DM_TILE=16 -DSTAGES=2 -DSHARED_BYTES=82688
// config m64_fp16: -DM_TILE=64 -DSTAGES=2 -DIS_BF16=0 -DSHARED_BYTES=100608
// config m64_fused: -DM_TILE=64 -DSTAGES=2 -DFUSED_MERGE=1 -DSHARED_BYTES=100608
// config m32_unaligned: -DM_TILE=32 -DSTAGES=2 -DALIGNED=0 -DSHARED_BYTES=91392

#ifndef M_TILE
#define M_TILE 64  // query rows (heads x nodes) of a block: 16, 32 or 64
#endif
#ifndef TOKENS
#define TOKENS 32  // KV rows of a stage: 32 or 64 (64 needs more than 99 KB)
#endif
#ifndef STAGES
#define STAGES 2  // KV stages in shared memory
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1  // blocks per SM the registers are capped for
#endif
#ifndef IS_BF16
#define IS_BF16 1  // bf16, else fp16
#endif
#ifndef PARTIAL_F32
#define PARTIAL_F32 0  // partial outputs in fp32 instead of the query's dtype
#endif
#ifndef FUSED_MERGE
#define FUSED_MERGE 0  // merge inside the kernel: all blocks must be resident (cooperative launch)
#endif
#ifndef ALIGNED
#define ALIGNED 1  // rows of q and kv start at multiples of 16 bytes; without it use at most 32 rows (registers)
#endif
#ifndef DUMP_SCORES
#define DUMP_SCORES 0  // debug: also write the masked, scaled scores (base 2)
#endif

namespace {

typedef unsigned short half_bits;  // a bf16 or fp16 value
typedef long long int64;

constexpr int kLatent = 512, kWidth = 576, kRowBytes = kWidth * 2, kRopeByte = kLatent * 2;
constexpr int kThreads = 256;
constexpr int kKSplit = 4;                              // warps that share the columns of a key
constexpr int kRowGroups = M_TILE == 64 ? 2 : 1;        // groups of 4 warps over the rows ...
constexpr int kTokenGroups = 2 / kRowGroups;            // ... or over the tokens of a stage
constexpr int kRowTiles = M_TILE / kRowGroups / 16;     // m16 tiles of a warp in Q.K
constexpr int kBlocks = TOKENS / 16;                    // n16 blocks of a stage
constexpr int kWarpBlocks = kBlocks / kTokenGroups;     // of those, a warp's own in Q.K
constexpr int kOwners = M_TILE / 8;                     // warps that own 8 rows in the softmax
constexpr bool kKeepsOwn = kRowGroups == 2;             // an owner's own partial stays in registers
constexpr int kSources = kKeepsOwn ? kKSplit - 1 : kKSplit;
constexpr int kKSteps = kWidth / 16 / kKSplit;          // k16 steps of a warp
constexpr bool kDeep = STAGES >= 3;                     // a tile lands one barrier early: two barriers a tile, not three
// Copies stall in their queue: between the MMAs of the scores that time is not lost, and the two warps of a scheduler
// take turns. With more stages, or where it costs registers (fused), they go in one piece.
constexpr bool kCopiesBetween = !kDeep && !FUSED_MERGE;
constexpr int kCopyRows = TOKENS / 32;                  // KV rows a thread copies a part of, per stage
constexpr bool kQueriesFit = TOKENS >= M_TILE;            // all queries pass through one stage, in one trip to memory
constexpr int kStageBytes = TOKENS * kRowBytes;
constexpr int kExchangeBytes = kSources * kOwners * kBlocks * 512;
constexpr int kStateBytes = kOwners * 32 * 8;
constexpr float kRescaleLog2 = 8.f;
constexpr float kLn2 = 0.6931471805599453f;

static_assert(M_TILE == 16 || M_TILE == 32 || M_TILE == 64, "M_TILE");
static_assert(TOKENS == 32 || TOKENS == 64, "TOKENS");
static_assert(STAGES >= 2, "STAGES");
static_assert(STAGES * kStageBytes >= M_TILE * kLatent * 2, "the epilogue stages O where the KV rows were");
#ifdef SHARED_BYTES  // what the launcher asks for
static_assert(SHARED_BYTES == STAGES * kStageBytes + kExchangeBytes + kStateBytes + 64 * 4, "SHARED_BYTES");
#endif
static_assert(TOKENS * 64 >= M_TILE * TOKENS, "P must fit into the rope columns of a stage");

// What a block works on; kept in shared memory because the main loop has no registers to spare.
struct Span {
  int q_begin, kv_begin, prefix, end, drafts, kv_len, live;
  unsigned stages;  // shared address of the first stage
};

enum MaskLayout { kCausal = 0, kTree = 1, kFull = 2, kPacked = 3 };

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// ---- PTX

// threadIdx.x, read anew: what is derived from it is not kept in registers across the main loop.
__device__ __forceinline__ int reread_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

struct Block {
  int x, y, z, row_tiles, splits;
};

__device__ __forceinline__ Block reread_block() {
  Block block;
  asm volatile("mov.u32 %0, %%ctaid.x; mov.u32 %1, %%ctaid.y; mov.u32 %2, %%ctaid.z;"
               : "=r"(block.x), "=r"(block.y), "=r"(block.z));
  asm volatile("mov.u32 %0, %%nctaid.x; mov.u32 %1, %%nctaid.y;" : "=r"(block.row_tiles), "=r"(block.splits));
  return block;
}

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void copy_16(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void load_matrices(unsigned (&r)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if IS_BF16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned pack(float low, float high) {
  unsigned packed;
#if IS_BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
  return packed;
}

__device__ __forceinline__ float2 unpack(unsigned packed) {
  float2 v;
#if IS_BF16
  v.x = __uint_as_float(packed << 16);
  v.y = __uint_as_float(packed & 0xffff0000u);
#else
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(v.x), "=f"(v.y)
      : "r"(packed));
#endif
  return v;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void store_shared_16(unsigned to, const unsigned (&word)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
}

__device__ __forceinline__ void load_shared_16(unsigned (&word)[4], unsigned from) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void store_shared_4(unsigned to, unsigned word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

__device__ __forceinline__ unsigned load_acquire(const unsigned* from) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// ---- end of PTX

// Offset of 16-byte chunk `chunk` of P row `row` in a stage: the rope columns of its token rows, conflict-free.
__device__ __forceinline__ int p_offset(int row, int chunk) {
  if (TOKENS == 64) return row * kRowBytes + kRopeByte + 16 * (chunk ^ (row & 7));
  return (row >> 1) * kRowBytes + kRopeByte + 16 * (((row & 1) << 2) + (chunk ^ ((row >> 1) & 3)));
}

// KV rows of one split: a multiple of the stage, so that only a request's last tile is partial.
__device__ __forceinline__ int split_rows(int kv_len, int nsplit) {
  const int even = (kv_len + nsplit - 1) / nsplit;
  return (even + TOKENS - 1) / TOKENS * TOKENS;
}

// A slot is a row of the pool; it fits 31 bits, its element offset does not.
__device__ __forceinline__ int load_slot(const void* slots, int is_64, int i) {
  return is_64 ? static_cast<int>(static_cast<const int64*>(slots)[i]) : static_cast<const int*>(slots)[i];
}

// Copies the thread's 9 chunks (every eighth) of one row of 576 elements to swizzled shared memory, or zeros.
__device__ __forceinline__ void copy_row(unsigned to, const half_bits* from, bool valid) {
#if ALIGNED
#pragma unroll
  for (int j = 0; j < 9; ++j) copy_16(to + 128 * j, from + 64 * j, valid ? 16 : 0);
#else
#pragma unroll 1
  for (int i = 0; i < 36; ++i) {  // word i & 3 of chunk i >> 2
    const half_bits* const at = from + 64 * (i >> 2) + 2 * (i & 3);
    store_shared_4(to + 128 * (i >> 2) + 4 * (i & 3), valid ? at[0] | static_cast<unsigned>(at[1]) << 16 : 0u);
  }
#endif
}

// Elements that are not finite become 0: a row hidden from some queries may hold anything, and 0 * NaN is NaN.
__device__ __forceinline__ unsigned finite(unsigned word) {
  const unsigned exponent = IS_BF16 ? 0x7f80u : 0x7c00u;
  if ((word & exponent) == exponent) word &= 0xffff0000u;
  if ((word & exponent << 16) == exponent << 16) word &= 0xffffu;
  return word;
}

// The weighted sum of this thread's 8 columns over every `stride`-th live split of a row, from `group` < stride on, and
// the row's maximum LSE and sum of weights. lse [nsplit], partial [nsplit, 512] of the row, from the columns on.
template <int kAhead>
__device__ __forceinline__ void weigh_splits(const unsigned char* from, const float* lse, int live, int group, int stride,
                                             float (&acc)[8], float& top, float& total) {
  constexpr int kElementBytes = PARTIAL_F32 ? 4 : 2, kWords = kElementBytes / 2;
  const int lane = threadIdx.x & 31;
  float base = 0.f;
  top = minus_infinity(), total = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) acc[i] = 0.f;
  for (int first = group; first - group < live; first += stride * kAhead) {
    uint4 words[kAhead][kWords];
    float lses[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {  // all loads first: the row maximum is found while they are on their way
      const int s = first + stride * i;
      lses[i] = s < live ? __ldcg(lse + s) : minus_infinity();
#pragma unroll
      for (int w = 0; w < kWords; ++w)
        words[i][w] = s < live ? __ldcg(reinterpret_cast<const uint4*>(from + int64(s) * kLatent * kElementBytes) + w)
                               : make_uint4(0, 0, 0, 0);
    }
    if (first == group) {
      for (int s = lane; s < live; s += 32) top = fmaxf(top, __ldcg(lse + s));
#pragma unroll
      for (int x = 16; x > 0; x >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, x));
      base = top == minus_infinity() ? 0.f : top;
      for (int s = lane; s < live; s += 32) total += exp2_fast(__ldcg(lse + s) - base);
#pragma unroll
      for (int x = 16; x > 0; x >>= 1) total += __shfl_xor_sync(~0u, total, x);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const float weight = exp2_fast(lses[i] - base);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const unsigned word[4] = {words[i][w].x, words[i][w].y, words[i][w].z, words[i][w].w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#if PARTIAL_F32
          acc[4 * w + e] += weight * __uint_as_float(word[e]);
#else
          const float2 v = unpack(word[e]);
          acc[2 * e] += weight * v.x;
          acc[2 * e + 1] += weight * v.y;
#endif
        }
      }
    }
  }
}

// One row's merge over its live splits, 128 of its 512 columns, by a whole block.
// lse [nsplit], partial [nsplit, 512] of this row; `sums` holds 8 x 128 floats.
__device__ __forceinline__ void merge_row(const void* partial, const float* lse, int live, int quarter, half_bits* out,
                                          float* out_lse, float* sums) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int column = quarter * 128 + (threadIdx.x & 15) * 8;
  float acc[8], top, total;
  weigh_splits<4>(static_cast<const unsigned char*>(partial) + column * (PARTIAL_F32 ? 4 : 2), lse, live,
                  threadIdx.x >> 4, 16, acc, top, total);
#pragma unroll
  for (int i = 0; i < 8; ++i) acc[i] += __shfl_xor_sync(~0u, acc[i], 16);
  if (lane < 16) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[warp * 128 + lane * 8 + i] = acc[i];
  }
  __syncthreads();
  if (threadIdx.x < 64) {
    const int c = threadIdx.x * 2;
    float a = 0.f, b = 0.f;
#pragma unroll
    for (int w = 0; w < 8; ++w) {
      a += sums[w * 128 + c];
      b += sums[w * 128 + c + 1];
    }
    const float inverse = total > 0.f ? 1.f / total : 0.f;
    *reinterpret_cast<unsigned*>(out + quarter * 128 + c) = pack(a * inverse, b * inverse);
    if (quarter == 0 && threadIdx.x == 0) *out_lse = total > 0.f ? (top + log2f(total)) * kLn2 : minus_infinity();
  }
  __syncthreads();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) verify_attn_flash(
    const half_bits* __restrict__ q,  // [T, heads, 576], strides in elements
    int64 q_token_stride, int64 q_head_stride,
    const half_bits* __restrict__ kv,  // [pool, 576], row stride in elements
    int64 kv_stride, const int* __restrict__ qo_indptr, const int* __restrict__ kv_indptr,
    const void* __restrict__ kv_indices, int kv_indices_64,
    const void* __restrict__ draft_slots, int draft_slots_64,
    int has_draft_slots,  // else the draft rows are the last of kv_indices
    const void* __restrict__ mask, int mask_layout, int mask_words, int heads, int max_rows,
    int tokens_out,  // T: rows behind qo_indptr[bs] are padding
    float scale_log2, half_bits* __restrict__ out, float* __restrict__ out_lse,
    void* partial,       // [bs, max_rows, nsplit, 512]
    float* partial_lse,  // [bs, max_rows, nsplit], base 2
    unsigned* arrivals,  // [bs, row tiles], zero before and after; FUSED_MERGE only
    float* scores, int scores_width) {
  extern __shared__ __align__(128) unsigned char shared[];
  unsigned char* const exchange = shared + STAGES * kStageBytes;
  // A row's maximum so far and this thread's share of its sum, [owner warp][lane]: no registers to spare.
  float2* const states = reinterpret_cast<float2*>(exchange + kExchangeBytes);
  float* const scales = reinterpret_cast<float*>(exchange + kExchangeBytes + kStateBytes);  // [row % 8][row / 8]
  __shared__ Span span;
  __shared__ int64 mask_base;  // mask entries of the requests before this one

  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int k_part = warp & 3, group = warp >> 2;
  const int row_group = kRowGroups == 2 ? group : 0, token_group = kTokenGroups == 2 ? group : 0;
  const int request = blockIdx.z, split = blockIdx.y, nsplit = gridDim.y, row0 = blockIdx.x * M_TILE;

  const int q_begin = qo_indptr[request], drafts = qo_indptr[request + 1] - q_begin, rows = drafts * heads;
  const int kv_begin = kv_indptr[request], listed = kv_indptr[request + 1] - kv_begin;

  if (nsplit == 1 || FUSED_MERGE) {  // no merge kernel follows that would clear the padding rows
    const int blocks = gridDim.x * gridDim.y * gridDim.z;
    const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    for (int64 row = int64(qo_indptr[gridDim.z]) * heads + block; row < int64(tokens_out) * heads; row += blocks) {
      reinterpret_cast<unsigned*>(out + row * kLatent)[thread] = 0;
      if (thread == 0) out_lse[row] = minus_infinity();
    }
  }
  if (row0 >= rows) return;

  const int prefix = has_draft_slots ? listed : listed - drafts;
  const int kv_len = prefix + drafts, per_split = split_rows(kv_len, nsplit);
  const int begin = split * per_split, end = min(begin + per_split, kv_len);
  if (begin >= end) return;

  // Thread t copies chunks t % 8 + 8 j of row t / 8; its swizzled place in a row is the same for every stage.
  const unsigned stages = shared_address(shared);
  const auto copy_offset = [](int thread) { return (thread >> 3) * kRowBytes + 16 * ((thread & 7) ^ ((thread >> 3) & 7)); };
  const auto fetch_slots = [&](int (&slot)[kCopyRows], int first, const Span& span) {  // of the rows from `first` on
    const int thread = reread_thread();
#pragma unroll
    for (int i = 0; i < kCopyRows; ++i) {
      const int position = first + (thread >> 3) + 32 * i;
      slot[i] = -1;
      if (position < span.end)
        slot[i] = has_draft_slots && position >= span.prefix
                      ? load_slot(draft_slots, draft_slots_64, span.q_begin + position - span.prefix)
                      : load_slot(kv_indices, kv_indices_64, span.kv_begin + position);
    }
  };
  const auto copy_rows = [&](const int (&slot)[kCopyRows], unsigned stage, int i) {  // rows 32 i .. of a tile
    const int thread = reread_thread();
    copy_row(stage + copy_offset(thread) + 32 * i * kRowBytes,
             kv + int64(max(slot[i], 0)) * kv_stride + (thread & 7) * 8, slot[i] >= 0);
  };
  const auto copy_tile = [&](const int (&slot)[kCopyRows], unsigned stage) {
#pragma unroll
    for (int i = 0; i < kCopyRows; ++i) copy_rows(slot, stage, i);
  };
  // Rows [32 half, 32 half + 32) of the query tile go through a stage (from its row `at` on) into registers.
  const auto copy_queries = [&](int half, int stage, int at) {
    const int row = row0 + half * 32 + (thread >> 3);
    const bool valid = row < rows && half * 32 + (thread >> 3) < M_TILE;
    const int node = valid ? row / heads : 0, head = valid ? row % heads : 0;
    copy_row(stages + copy_offset(thread) + stage * kStageBytes + at * kRowBytes,
             q + (q_begin + node) * q_token_stride + head * q_head_stride + (thread & 7) * 8, valid);
  };

  // ---- prologue: the first tiles are on their way while Q becomes fragments
  const Span here = {q_begin, kv_begin, prefix, end, drafts, kv_len, (kv_len + per_split - 1) / per_split, stages};
  int slots[STAGES][kCopyRows];
#pragma unroll
  for (int tile = 0; tile < STAGES; ++tile) fetch_slots(slots[tile], begin + tile * TOKENS, here);
  constexpr int kFirstTiles = kDeep ? STAGES - 2 : 1;  // the other stages are taken by Q
  copy_queries(0, STAGES - 1, 0);
  if (kRowGroups == 2 && (kDeep || kQueriesFit)) copy_queries(1, kQueriesFit ? STAGES - 1 : STAGES - 2, kQueriesFit ? 32 : 0);
  commit_copies();
#pragma unroll
  for (int tile = 0; tile < kFirstTiles; ++tile) {
    copy_tile(slots[tile], stages + tile * kStageBytes);
    commit_copies();
  }

  if (thread == 0) span = here;
  if (warp == 7) {
    int64 sum = 0;
    for (int r = lane; r < request && (mask_layout == kTree || mask_layout == kFull); r += 32) {
      const int n = qo_indptr[r + 1] - qo_indptr[r];
      sum += int64(n) * (mask_layout == kTree ? n : kv_indptr[r + 1] - kv_indptr[r] + (has_draft_slots ? n : 0));
    }
#pragma unroll
    for (int x = 16; x > 0; x >>= 1) sum += __shfl_xor_sync(~0u, sum, x);
    if (lane == 0) mask_base = sum;
  }

  unsigned q_fragments[kKSteps][kRowTiles][4];
  // Fragment slot s of a warp (s = 8-row block of its row group) holds block s ^ k_part when owners keep their own.
  const auto load_queries = [&](int stage, int at) {
    const int chunk = 2 * k_part + (lane >> 4);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      int block = 2 * m + ((lane >> 3) & 1);
      if (kKeepsOwn) block ^= k_part;
      const unsigned from =
          stages + stage * kStageBytes + (at + block * 8 + (lane & 7)) * kRowBytes + 16 * (chunk ^ (lane & 7));
#pragma unroll
      for (int k = 0; k < kKSteps; ++k) load_matrices(q_fragments[k][m], from + 128 * k);
    }
  };
  wait_copies<kFirstTiles>();
  __syncthreads();
  if (kDeep) {
    load_queries(STAGES - 1 - (kQueriesFit ? 0 : row_group), kQueriesFit ? 32 * row_group : 0);
    wait_copies<kFirstTiles - 1>();
    __syncthreads();  // the first tile has landed, and the stages of Q are free
    copy_tile(slots[STAGES - 2], stages + (STAGES - 2) * kStageBytes);
    commit_copies();
  } else {
    if (kQueriesFit || row_group == 0) load_queries(1, kQueriesFit ? 32 * row_group : 0);
    if (kRowGroups == 2 && !kQueriesFit) {
      __syncthreads();
      copy_queries(1, 1, 0);
      commit_copies();
      wait_copies<0>();
      __syncthreads();
      if (row_group == 1) load_queries(1, 0);
    }
  }

  float o[kOwners / 2][8][4];  // [m16][n8][fragment]: M_TILE rows x columns 64 warp ..
#pragma unroll
  for (int m = 0; m < kOwners / 2; ++m)
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[m][n][i] = 0.f;
  if (kOwners == 8 || warp < kOwners) states[thread] = make_float2(minus_infinity(), 0.f);

  unsigned stage = stages;  // address of this tile's
  int slot[kCopyRows];  // of the next tile to copy: loaded one tile ahead of its use
#pragma unroll
  for (int i = 0; i < kCopyRows; ++i) slot[i] = slots[STAGES - 1][i];
#pragma unroll 1
  for (int first = begin; first < span.end; first += TOKENS) {
    const auto copy_part = [&](int i) {  // rows 32 i .. of the next tile, into the stage of the one before this
      if (first + (STAGES - 1) * TOKENS < span.end)
        copy_rows(slot, stage == span.stages ? stage + (STAGES - 1) * kStageBytes : stage - kStageBytes, i);
    };
    const auto end_copy = [&]() {
      commit_copies();
      fetch_slots(slot, first + STAGES * TOKENS, span);
    };
    const auto copy_next = [&]() {
#pragma unroll
      for (int i = 0; i < kCopyRows; ++i) copy_part(i);
      end_copy();
    };
    if (!kDeep) {
      wait_copies<0>();
      __syncthreads();  // this tile has landed, and the stage of the last one is free
      if (!kCopiesBetween) copy_next();
    }

    // ---- partial scores: this warp's quarter of the columns
    float4 kept[kBlocks];
    {
    const int thread = reread_thread(), lane = thread & 31, warp = thread >> 5, k_part = warp & 3, row_group = kRowGroups == 2 ? warp >> 2 : 0,
      token_group = kTokenGroups == 2 ? warp >> 2 : 0;
    const unsigned key_from = stage + (token_group * kWarpBlocks * 16 + (lane >> 4) * 8 + (lane & 7)) * kRowBytes +
                              16 * ((2 * k_part + ((lane >> 3) & 1)) ^ (lane & 7));
#pragma unroll
    for (int b = 0; b < kWarpBlocks; ++b) {
      float s[kRowTiles][2][4] = {};
#pragma unroll
      for (int k = 0; k < kKSteps; ++k) {
        unsigned keys[4];
        load_matrices(keys, key_from + b * 16 * kRowBytes + 128 * k);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma(s[m][0], q_fragments[k][m], keys[0], keys[1]);
          mma(s[m][1], q_fragments[k][m], keys[2], keys[3]);
        }
      }
      if (kCopiesBetween) {
        constexpr int kLater = kRowGroups == 2 ? kWarpBlocks / 2 : 0;
        if (row_group == 0 && b < kCopyRows) copy_part(b);
        if (row_group == 1 && b >= kLater && b - kLater < kCopyRows) copy_part(b - kLater);
      }
      const int block = token_group * kWarpBlocks + b;
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) {  // fragment slot i: 8 rows
        const int m = i >> 1, h = 2 * (i & 1);
        const float4 part = make_float4(s[m][0][h], s[m][0][h + 1], s[m][1][h], s[m][1][h + 1]);
        if (kKeepsOwn && i == 0) {
          kept[b] = part;
        } else {
          const int source = kKeepsOwn ? i - 1 : k_part;
          const int owner = kKeepsOwn ? row_group * 4 + (i ^ k_part) : i;
          reinterpret_cast<float4*>(exchange)[((source * kOwners + owner) * kBlocks + block) * 32 + lane] = part;
        }
      }
    }
    }
    if (kCopiesBetween) end_copy();
    __syncthreads();  // all partial scores are there, and nobody needs the rope columns any more

    const bool masked = first + TOKENS > min(span.end, span.prefix) || mask_layout == kFull;
    if (masked) {  // values of hidden rows; nobody reads them between these two barriers
      const int thread = reread_thread();
#pragma unroll 1
      for (int i = 0; i < 8 * kCopyRows; ++i) {
        const unsigned at = stage + copy_offset(thread) + (i >> 3) * 32 * kRowBytes + (i & 7) * 128;
        unsigned word[4];
        load_shared_16(word, at);
#pragma unroll
        for (int w = 0; w < 4; ++w) word[w] = finite(word[w]);
        store_shared_16(at, word);
      }
    }

    // ---- softmax: warp w owns rows 8 w .. 8 w + 7, four lanes a row
    if (kOwners == 8 || warp < kOwners) {
      const int thread = reread_thread(), lane = thread & 31, warp = thread >> 5;
      float p[kBlocks][4];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        float4 sum = kKeepsOwn ? kept[b] : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int source = 0; source < kSources; ++source) {
          const float4 part =
              reinterpret_cast<const float4*>(exchange)[((source * kOwners + warp) * kBlocks + b) * 32 + lane];
          sum.x += part.x;
          sum.y += part.y;
          sum.z += part.z;
          sum.w += part.w;
        }
        p[b][0] = sum.x * scale_log2;
        p[b][1] = sum.y * scale_log2;
        p[b][2] = sum.z * scale_log2;
        p[b][3] = sum.w * scale_log2;
      }
      if (masked) {
        const int row = reread_block().x * M_TILE + 8 * warp + (lane >> 2), node = row / heads;
        const unsigned char* bytes = static_cast<const unsigned char*>(mask);
        const unsigned* words = static_cast<const unsigned*>(mask) + int64(span.q_begin + node) * mask_words;
        if (mask_layout == kTree) bytes += mask_base + int64(node) * span.drafts;
        if (mask_layout == kFull) bytes += mask_base + int64(node) * span.kv_len;
        unsigned hidden = 0;
#pragma unroll 1
        for (int i = 0; i < 4 * kBlocks; ++i) {
          const int position = first + 8 * (i >> 1) + 2 * (lane & 3) + (i & 1), draft = position - span.prefix;
          bool visible = position < span.end && node < span.drafts;
          if (visible && mask_layout == kFull) visible = bytes[position] != 0;
          if (visible && draft >= 0) {
            if (mask_layout == kCausal) visible = draft <= node;
            if (mask_layout == kTree) visible = bytes[draft] != 0;
            if (mask_layout == kPacked) visible = words[draft >> 5] >> (draft & 31) & 1;
          }
          hidden |= static_cast<unsigned>(!visible) << i;
        }
#pragma unroll
        for (int i = 0; i < 4 * kBlocks; ++i)
          if (hidden >> i & 1) p[i >> 2][i & 3] = minus_infinity();
      }
#if DUMP_SCORES
      if (row0 + 8 * warp + (lane >> 2) < rows)
        for (int b = 0; b < kBlocks; ++b)
          for (int i = 0; i < 4; ++i) {
            const int position = first + 16 * b + 8 * (i >> 1) + 2 * (lane & 3) + (i & 1);
            const int64 row = int64(request) * max_rows + row0 + 8 * warp + (lane >> 2);
            if (position < span.end) scores[row * scores_width + position] = p[b][i];
          }
#endif
      float tile_max = minus_infinity();
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) tile_max = fmaxf(tile_max, fmaxf(fmaxf(p[b][0], p[b][1]), fmaxf(p[b][2], p[b][3])));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(~0u, tile_max, 1));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(~0u, tile_max, 2));
      float2 state = states[thread];
      float scale = 1.f;
      if (tile_max > state.x + kRescaleLog2) {
        scale = exp2_fast(state.x - tile_max);  // 0 the first time
        state.x = tile_max;
      }
      const float base = state.x == minus_infinity() ? 0.f : state.x;
      state.y *= scale;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          p[b][i] = exp2_fast(p[b][i] - base);
          state.y += p[b][i];
        }
        const int row = 8 * warp + (lane >> 2), within = 4 * (lane & 3);
        store_shared_4(stage + p_offset(row, 2 * b) + within, pack(p[b][0], p[b][1]));
        store_shared_4(stage + p_offset(row, 2 * b + 1) + within, pack(p[b][2], p[b][3]));
      }
      if ((lane & 3) == 0) scales[(lane >> 2) * 8 + warp] = scale;
      states[thread] = state;
    }
    if (kDeep) wait_copies<kDeep ? STAGES - 3 : 0>();
    __syncthreads();  // P and the scales are there, and with kDeep the next tile
    if (kDeep) copy_next();

    // ---- O = scale O + P V: every row, this warp's 64 columns
    {
      const int lane = reread_thread() & 31;
      float scale[kOwners];
      bool grew = false;
#pragma unroll
      for (int i = 0; i < kOwners; ++i) {
        scale[i] = scales[(lane >> 2) * 8 + i];
        grew |= scale[i] != 1.f;
      }
      if (__any_sync(~0u, grew)) {
#pragma unroll
        for (int m = 0; m < kOwners / 2; ++m)
#pragma unroll
          for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) o[m][n][i] *= scale[2 * m + (i >> 1)];
      }
    }
    {
    const int thread = reread_thread(), lane = thread & 31, warp = thread >> 5;
    const unsigned value_from = stage + (lane & 15) * kRowBytes + 128 * warp +
                                16 * ((lane >> 4) ^ (lane & 7));                     // ^ 32 c: columns 16 c
    const unsigned p_from = stage + p_offset(lane & 15, lane >> 4);  // ^ 32 t: tokens 16 t
#pragma unroll
    for (int t = 0; t < kBlocks; ++t) {
      unsigned probabilities[kOwners / 2][4];
#pragma unroll
      for (int m = 0; m < kOwners / 2; ++m)
        load_matrices(probabilities[m],
                      (p_from ^ (32 * t)) + m * (TOKENS == 64 ? 16 : 8) * kRowBytes);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        unsigned values[4];
        load_matrices_transposed(values, (value_from ^ (32 * c)) + t * 16 * kRowBytes);
#pragma unroll
        for (int m = 0; m < kOwners / 2; ++m) {
          mma(o[m][2 * c], probabilities[m], values[0], values[1]);
          mma(o[m][2 * c + 1], probabilities[m], values[2], values[3]);
        }
      }
    }
    }
    stage = stage == span.stages + (STAGES - 1) * kStageBytes ? span.stages : stage + kStageBytes;
  }

  {
  // ---- epilogue: normalise, leave through shared memory in whole rows
  __syncthreads();
  const Block block = reread_block();
  const int thread = reread_thread(), lane = thread & 31, warp = thread >> 5;
  const int nsplit = block.splits, row0 = block.x * M_TILE, rows = span.drafts * heads;
  const bool is_final = nsplit == 1;
  const int64 out_row0 = int64(span.q_begin) * heads + row0, partial_row0 = int64(block.z) * max_rows + row0;
  if (kOwners == 8 || warp < kOwners) {
    const float2 state = states[thread];
    float row_sum = state.y;
    row_sum += __shfl_xor_sync(~0u, row_sum, 1);
    row_sum += __shfl_xor_sync(~0u, row_sum, 2);
    const int row = 8 * warp + (lane >> 2);
    if ((lane & 3) == 0) {
      scales[(lane >> 2) * 8 + warp] = row_sum > 0.f ? 1.f / row_sum : 0.f;
      const float lse = row_sum > 0.f ? state.x + log2f(row_sum) : minus_infinity();
      if (row0 + row < rows) {
        if (is_final)
          out_lse[out_row0 + row] = lse * kLn2;
        else
          partial_lse[(partial_row0 + row) * nsplit + block.y] = lse;
      }
    }
  }
  __syncthreads();
  float scale[kOwners];
#pragma unroll
  for (int i = 0; i < kOwners; ++i) scale[i] = scales[(lane >> 2) * 8 + i];
#if PARTIAL_F32
  if (!is_final) {
#pragma unroll
    for (int m = 0; m < kOwners / 2; ++m)
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = 16 * m + 8 * h + (lane >> 2), column = 64 * warp + 8 * n + 2 * (lane & 3);
          if (row0 + row < rows)
            *reinterpret_cast<float2*>(static_cast<float*>(partial) +
                                       ((partial_row0 + row) * nsplit + block.y) * kLatent + column) =
                make_float2(o[m][n][2 * h] * scale[2 * m + h], o[m][n][2 * h + 1] * scale[2 * m + h]);
        }
  } else
#endif
  {
#pragma unroll
    for (int m = 0; m < kOwners / 2; ++m)
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = 16 * m + 8 * h + (lane >> 2), chunk = (8 * warp + n) ^ (lane >> 2);
          *reinterpret_cast<unsigned*>(shared + row * kLatent * 2 + chunk * 16 + 4 * (lane & 3)) =
              pack(o[m][n][2 * h] * scale[2 * m + h], o[m][n][2 * h + 1] * scale[2 * m + h]);
        }
    __syncthreads();
    half_bits* const to = is_final ? out + out_row0 * kLatent
                                   : static_cast<half_bits*>(partial) + (partial_row0 * nsplit + block.y) * kLatent;
    const int64 row_stride = is_final ? kLatent : int64(nsplit) * kLatent;
#pragma unroll 4
    for (int i = thread; i < M_TILE * 64; i += kThreads) {  // 16-byte chunks
      const int row = i >> 6, chunk = i & 63;
      if (row0 + row < rows)
        *reinterpret_cast<uint4*>(to + row * row_stride + chunk * 8) =
            *reinterpret_cast<const uint4*>(shared + row * kLatent * 2 + ((chunk ^ (row & 7)) * 16));
    }
  }

#if FUSED_MERGE
  if (is_final) return;
  const int live = span.live;
  unsigned* const counter = arrivals + block.z * block.row_tiles + block.x;
  __threadfence();
  __syncthreads();
  if (thread == 0) {
    atomicInc(counter, 2 * live - 1);  // wraps to 0 when the last block has left, not before
    while (load_acquire(counter) < static_cast<unsigned>(live)) {
    }
    atomicInc(counter, 2 * live - 1);
  }
  __syncthreads();
  const int units = min(M_TILE, rows - row0) * 4;
  for (int unit = block.y; unit < units; unit += live) {
    const int64 row = partial_row0 + (unit >> 2), out_row = out_row0 + (unit >> 2);
    const int64 element = row * nsplit * kLatent;
#if PARTIAL_F32
    const void* from = static_cast<const float*>(partial) + element;
#else
    const void* from = static_cast<const half_bits*>(partial) + element;
#endif
    merge_row(from, partial_lse + row * nsplit, live, unit & 3, out + out_row * kLatent, out_lse + out_row,
              reinterpret_cast<float*>(shared));
  }
#endif
  }
}

// Grid (T * heads, 4): merges a row's splits, 128 columns a block; padding rows become 0 and -inf.
extern "C" __global__ void __launch_bounds__(kThreads) verify_attn_flash_merge(
    const int* __restrict__ qo_indptr, const int* __restrict__ kv_indptr, int has_draft_slots, int bs, int heads,
    int max_rows, int nsplit, half_bits* __restrict__ out, float* __restrict__ out_lse, const void* partial,
    const float* partial_lse) {
  __shared__ float sums[8 * 128];
  const int64 out_row = blockIdx.x;
  const int token = blockIdx.x / heads, lane = threadIdx.x & 31;
  int request = 0;  // requests that end at or before this token
  for (int r = lane; r < bs; r += 32) request += qo_indptr[r + 1] <= token;
#pragma unroll
  for (int x = 16; x > 0; x >>= 1) request += __shfl_xor_sync(~0u, request, x);
  if (request == bs) {
    if (threadIdx.x < 64) reinterpret_cast<unsigned*>(out + out_row * kLatent)[blockIdx.y * 64 + threadIdx.x] = 0;
    if (blockIdx.y == 0 && threadIdx.x == 0) out_lse[out_row] = minus_infinity();
    return;
  }
  const int q_begin = qo_indptr[request];
  const int kv_len = kv_indptr[request + 1] - kv_indptr[request] + (has_draft_slots ? qo_indptr[request + 1] - q_begin : 0);
  const int per_split = split_rows(kv_len, nsplit);
  const int64 row = int64(request) * max_rows + out_row - int64(q_begin) * heads;
#if PARTIAL_F32
  const void* from = static_cast<const float*>(partial) + row * nsplit * kLatent;
#else
  const void* from = static_cast<const half_bits*>(partial) + row * nsplit * kLatent;
#endif
  merge_row(from, partial_lse + row * nsplit, (kv_len + per_split - 1) / per_split, blockIdx.y, out + out_row * kLatent,
            out_lse + out_row, sums);
}

// Grid (ceil(2 T * heads * groups / 8)): `groups` (a divisor of 8) warps merge 256 columns of a row, so that many rows
// need few blocks; padding rows become 0 and -inf.
extern "C" __global__ void __launch_bounds__(kThreads) verify_attn_flash_merge_warps(
    const int* __restrict__ qo_indptr, const int* __restrict__ kv_indptr, int has_draft_slots, int bs, int heads,
    int max_rows, int nsplit, half_bits* __restrict__ out, float* __restrict__ out_lse, const void* partial,
    const float* partial_lse, int out_rows, int groups) {
  __shared__ float sums[8 * 256];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = warp & (groups - 1);
  const int unit = (blockIdx.x * 8 + warp) / groups, out_row = unit >> 1, half = unit & 1, token = out_row / heads;
  int request = 0;  // requests that end at or before this token
  for (int r = lane; r < bs; r += 32) request += qo_indptr[r + 1] <= token;
#pragma unroll
  for (int x = 16; x > 0; x >>= 1) request += __shfl_xor_sync(~0u, request, x);
  float acc[8] = {}, top = minus_infinity(), total = 0.f;
  const bool inside = out_row < out_rows;
  if (inside && request < bs) {
    const int q_begin = qo_indptr[request];
    const int listed = kv_indptr[request + 1] - kv_indptr[request];
    const int kv_len = has_draft_slots ? listed + qo_indptr[request + 1] - q_begin : listed;
    const int per_split = split_rows(kv_len, nsplit), live = (kv_len + per_split - 1) / per_split;
    const int64 row = int64(request) * max_rows + out_row - int64(q_begin) * heads;
    const unsigned char* const from = static_cast<const unsigned char*>(partial) +
                                      (row * nsplit * kLatent + half * 256 + lane * 8) * (PARTIAL_F32 ? 4 : 2);
    weigh_splits<PARTIAL_F32 ? 2 : 6>(from, partial_lse + row * nsplit, live, group, groups, acc, top, total);
  }
  if (groups > 1) {
#pragma unroll
    for (int i = 0; i < 8; i += 4)
      *reinterpret_cast<float4*>(sums + warp * 256 + i * 32 + lane * 4) =
          make_float4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]);
    __syncthreads();
    for (int g = 1; group == 0 && g < groups; ++g) {
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const float4 more = *reinterpret_cast<const float4*>(sums + (warp + g) * 256 + i * 32 + lane * 4);
        acc[i] += more.x, acc[i + 1] += more.y, acc[i + 2] += more.z, acc[i + 3] += more.w;
      }
    }
  }
  if (group != 0 || !inside) return;
  const float inverse = total > 0.f ? 1.f / total : 0.f;
  *reinterpret_cast<uint4*>(out + int64(out_row) * kLatent + half * 256 + lane * 8) =
      make_uint4(pack(acc[0] * inverse, acc[1] * inverse), pack(acc[2] * inverse, acc[3] * inverse),
                 pack(acc[4] * inverse, acc[5] * inverse), pack(acc[6] * inverse, acc[7] * inverse));
  if (half == 0 && lane == 0) out_lse[out_row] = total > 0.f ? (top + log2f(total)) * kLn2 : minus_infinity();
}
