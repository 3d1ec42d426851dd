// Runs CUDA blocks of 256 threads on a CPU: a fiber per thread, warp and block collectives by rendezvous, cp.async
// copies that land only when waited for. It replaces what lies between the PTX marks of a kernel source.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
using std::max;
using std::min;

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
struct Dim { int x, y, z; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class To, class From>
static To bits(From v) {
  To to;
  static_assert(sizeof(To) == sizeof(From), "bits");
  std::memcpy(&to, &v, sizeof(to));
  return to;
}
static float __int_as_float(unsigned v) { return bits<float>(v); }
static float __uint_as_float(unsigned v) { return bits<float>(v); }

namespace emulator {

constexpr int kThreads = 256, kLanes = 32, kWarps = kThreads / kLanes;

struct Copy { unsigned char* to; const unsigned char* from; int bytes; };
struct Deposit { const void* in; void* out; };

struct BlockState;
struct Fiber {
  ucontext_t context;  // for the start; later switches go through _setjmp, which makes no system call
  jmp_buf resume;
  std::unique_ptr<unsigned char[]> stack;
  BlockState* block = nullptr;
  int thread = 0;
  bool started = false, done = false, waiting = false;
  std::vector<std::vector<Copy>> groups{1};
};
struct BlockState {
  Dim index;
  std::vector<Fiber> fibers;
  std::vector<unsigned char> dynamic;
  unsigned char* shared = nullptr;
  std::map<const void*, std::vector<unsigned char>> statics;
  Deposit deposits[kThreads];
  int warp_arrived[kWarps] = {}, block_arrived = 0;
};

static Fiber* current = nullptr;
static jmp_buf scheduler;
static Dim grid;
static std::function<void()> body;

inline void pause() {
  if (!_setjmp(current->resume)) _longjmp(scheduler, 1);
}

inline void go_on(Fiber& fiber) {
  current = &fiber;
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.resume, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}

inline void enter() {
  body();
  current->done = true;
  pause();
}

// All 32 lanes meet; the last one runs `act` on everybody's deposits.
inline void warp_meet(Deposit mine, const std::function<void(Deposit*)>& act) {
  BlockState& block = *current->block;
  const int warp = current->thread / kLanes, first = warp * kLanes;
  block.deposits[current->thread] = mine;
  if (++block.warp_arrived[warp] == kLanes) {
    block.warp_arrived[warp] = 0;
    act(block.deposits + first);
    for (int i = 0; i < kLanes; ++i) block.fibers[first + i].waiting = false;
    return;
  }
  current->waiting = true;
  pause();
}

inline void block_meet() {
  BlockState& block = *current->block;
  if (++block.block_arrived == kThreads) {
    block.block_arrived = 0;
    for (Fiber& fiber : block.fibers) fiber.waiting = false;
    return;
  }
  current->waiting = true;
  pause();
}

template <class T>
T& shared_static(const char* name, int count = 1) {
  auto& bytes = current->block->statics[name];
  if (bytes.empty()) bytes.assign(sizeof(T) * count, 0xff);
  return *reinterpret_cast<T*>(bytes.data());
}

inline void start(BlockState& block, int dynamic_bytes) {
  block.dynamic.assign(dynamic_bytes + 128, 0xff);  // NaN wherever nobody wrote
  block.shared = block.dynamic.data() + (128 - reinterpret_cast<uintptr_t>(block.dynamic.data()) % 128) % 128;
  block.fibers = std::vector<Fiber>(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    Fiber& fiber = block.fibers[t];
    fiber.block = &block, fiber.thread = t;
    fiber.stack.reset(new unsigned char[64 * 1024]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = 64 * 1024;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
}

// Runs `blocks` together. A random warp goes on until it waits for other warps. Returns false on a deadlock.
inline bool run(std::vector<BlockState>& blocks, std::mt19937& random) {
  for (;;) {
    std::vector<std::pair<BlockState*, int>> ready;
    bool all_done = true;
    for (BlockState& block : blocks)
      for (int warp = 0; warp < kWarps; ++warp) {
        bool runnable = false;
        for (int i = 0; i < kLanes; ++i) {
          const Fiber& fiber = block.fibers[warp * kLanes + i];
          all_done &= fiber.done;
          runnable |= !fiber.done && !fiber.waiting;
        }
        if (runnable) ready.push_back({&block, warp});
      }
    if (all_done) return true;
    if (ready.empty()) return false;
    const auto [block, warp] = ready[random() % ready.size()];
    for (unsigned steps = 1 + random() % 64; steps > 0; --steps)
      for (int i = 0; i < kLanes; ++i) {
        Fiber& fiber = block->fibers[warp * kLanes + i];
        if (fiber.done || fiber.waiting) continue;
        go_on(fiber);
      }
  }
}

template <class... Args, std::size_t... I>
void call(void (*kernel)(Args...), void** args, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_cv_t<Args>*>(args[I])...);
}

// together: all blocks are resident at once, as a kernel that waits for other blocks needs; else one at a time.
template <class... Args>
int launch(void (*kernel)(Args...), Dim size, int dynamic_bytes, unsigned seed, bool together, void** args) {
  std::mt19937 random(seed);
  grid = size;
  body = [=] { call(kernel, args, std::index_sequence_for<Args...>{}); };
  std::vector<BlockState> all;
  for (int z = 0; z < size.z; ++z)
    for (int y = 0; y < size.y; ++y)
      for (int x = 0; x < size.x; ++x) {
        all.emplace_back();
        all.back().index = {x, y, z};
      }
  std::shuffle(all.begin(), all.end(), random);
  std::vector<std::vector<BlockState>> waves;
  if (together) {
    waves.push_back(std::move(all));
  } else {
    for (BlockState& block : all) {
      waves.emplace_back();
      waves.back().push_back(std::move(block));
    }
  }
  for (auto& wave : waves) {
    for (BlockState& block : wave) start(block, dynamic_bytes);
    if (!run(wave, random)) return 1;
    wave.clear();
  }
  return 0;
}

template <class... Args>
int sizes(void (*)(Args...), int* out) {
  const int each[] = {int(sizeof(Args))...};
  std::copy(each, each + sizeof...(Args), out);
  return sizeof...(Args);
}

}  // namespace emulator

#define threadIdx (Dim{emulator::current->thread, 0, 0})
#define blockIdx (emulator::current->block->index)
#define gridDim (emulator::grid)

static void __syncthreads() { emulator::block_meet(); }
static void __threadfence() {}
static unsigned atomicInc(unsigned* at, unsigned top) {
  const unsigned old = *at;
  *at = old >= top ? 0 : old + 1;
  return old;
}
template <class T>
static T __ldcg(const T* from) {
  return *from;
}

template <class T>
static T __shfl_xor_sync(unsigned, T value, int mask) {
  T result;
  emulator::warp_meet({&value, &result}, [mask](emulator::Deposit* lane) {
    for (int i = 0; i < emulator::kLanes; ++i)
      *static_cast<T*>(lane[i].out) = *static_cast<const T*>(lane[i ^ mask].in);
  });
  return result;
}
static int __any_sync(unsigned, bool value) {
  int result;
  emulator::warp_meet({&value, &result}, [](emulator::Deposit* lane) {
    int any = 0;
    for (int i = 0; i < emulator::kLanes; ++i) any |= *static_cast<const bool*>(lane[i].in);
    for (int i = 0; i < emulator::kLanes; ++i) *static_cast<int*>(lane[i].out) = any;
  });
  return result;
}

// ---- what stands for the PTX functions of verify_attn_flash.cu

#ifndef IS_BF16
#define IS_BF16 1
#endif

static int reread_thread() { return emulator::current->thread; }
struct Block { int x, y, z, row_tiles, splits; };
static Block reread_block() { return {blockIdx.x, blockIdx.y, blockIdx.z, gridDim.x, gridDim.y}; }
static unsigned shared_address(const void* p) {
  return static_cast<unsigned>(static_cast<const unsigned char*>(p) - emulator::current->block->shared);
}
static unsigned char* at_shared(unsigned address) { return emulator::current->block->shared + address; }
static unsigned load_acquire(const unsigned* from) {
  emulator::pause();  // lets the other blocks go on
  return *from;
}
static void store_shared_16(unsigned to, const unsigned (&word)[4]) { std::memcpy(at_shared(to), word, 16); }

static void load_shared_16(unsigned (&word)[4], unsigned from) { std::memcpy(word, at_shared(from), 16); }
static void store_shared_4(unsigned to, unsigned word) { std::memcpy(at_shared(to), &word, 4); }

static void copy_16(unsigned to, const void* from, int bytes) {
  if (to % 16 || (bytes && reinterpret_cast<uintptr_t>(from) % 16)) std::abort();
  std::memset(at_shared(to), 0xff, 16);
  emulator::current->groups.back().push_back({at_shared(to), static_cast<const unsigned char*>(from), bytes});
}
static void commit_copies() { emulator::current->groups.emplace_back(); }
template <int kPending>
static void wait_copies() {
  auto& groups = emulator::current->groups;  // the last one is not committed yet
  for (int g = 0; g + 1 + kPending < static_cast<int>(groups.size()); ++g) {
    for (const emulator::Copy& copy : groups[g]) {
      std::memset(copy.to, 0, 16);
      std::memcpy(copy.to, copy.from, copy.bytes);
    }
    groups[g].clear();
  }
}

template <bool kTransposed>
static void load_matrices_of(unsigned (&r)[4], unsigned from) {
  if (from % 16) std::abort();
  const unsigned char* row = at_shared(from);
  emulator::warp_meet({row, r}, [](emulator::Deposit* lane) {
    for (int m = 0; m < 4; ++m)
      for (int i = 0; i < 32; ++i) {
        uint16_t pair[2];
        for (int e = 0; e < 2; ++e) {
          const int line = kTransposed ? 2 * (i % 4) + e : i / 4, column = kTransposed ? i / 4 : 2 * (i % 4) + e;
          pair[e] = static_cast<const uint16_t*>(lane[8 * m + line].in)[column];
        }
        static_cast<unsigned*>(lane[i].out)[m] = pair[0] | unsigned(pair[1]) << 16;
      }
  });
}
static void load_matrices(unsigned (&r)[4], unsigned from) { load_matrices_of<false>(r, from); }
static void load_matrices_transposed(unsigned (&r)[4], unsigned from) { load_matrices_of<true>(r, from); }

static float to_float(uint16_t v) {
#if IS_BF16
  return bits<float>(unsigned(v) << 16);
#else
  return static_cast<float>(bits<_Float16>(v));
#endif
}
static uint16_t to_half(float v) {
#if IS_BF16
  const unsigned u = bits<unsigned>(v);
  return std::isnan(v) ? 0x7fff : static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
#else
  return bits<uint16_t>(static_cast<_Float16>(v));
#endif
}

struct MmaInput { unsigned a[4], b[2]; };
static void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  MmaInput input{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  emulator::warp_meet({&input, c}, [](emulator::Deposit* lane) {
    float left[16][16], right[8][16];
    for (int i = 0; i < 32; ++i) {
      const MmaInput& in = *static_cast<const MmaInput*>(lane[i].in);
      const int g = i / 4, q = 2 * (i % 4);
      for (int e = 0; e < 2; ++e) {
        for (int part = 0; part < 4; ++part)
          left[g + 8 * (part & 1)][q + e + 8 * (part >> 1)] = to_float(in.a[part] >> 16 * e & 0xffff);
        for (int part = 0; part < 2; ++part) right[g][q + e + 8 * part] = to_float(in.b[part] >> 16 * e & 0xffff);
      }
    }
    for (int i = 0; i < 32; ++i)
      for (int part = 0; part < 4; ++part) {
        const int row = i / 4 + 8 * (part >> 1), column = 2 * (i % 4) + (part & 1);
        float sum = static_cast<float*>(lane[i].out)[part];
        for (int k = 0; k < 16; ++k) sum += left[row][k] * right[column][k];
        static_cast<float*>(lane[i].out)[part] = sum;
      }
  });
}

static unsigned pack(float low, float high) { return to_half(low) | unsigned(to_half(high)) << 16; }
static float2 unpack(unsigned packed) { return {to_float(packed & 0xffff), to_float(packed >> 16)}; }
static float exp2_fast(float x) { return exp2f(x); }
