"""A slow dense attention over the pool, one query row at a time: the oracle handed to the models."""

import torch


class TestPool:
    """The surface of a KV pool: rows 0..size per layer, poisoned until written."""

    __test__ = False

    def __init__(self, layers, size, width, dtype=torch.float32):
        self.rows = torch.full((layers, size + 1, width), float("nan"), dtype=dtype)

    def layer(self, index):
        return self.rows[index]


def dense_attend(sm_scale, latent):
    def attend(q, kv_layer, batch, layer_index):
        out = torch.zeros(*q.shape[:2], latent, dtype=q.dtype)
        offset = 0
        for b in range(len(batch.qo_indptr) - 1):
            begin, end = int(batch.qo_indptr[b]), int(batch.qo_indptr[b + 1])
            n = end - begin
            mask = torch.ones(n, n, dtype=torch.bool).tril()
            if batch.tree_mask is not None:
                mask = batch.tree_mask[offset : offset + n * n].view(n, n)
            offset += n * n
            prefix = kv_layer[
                batch.kv_indices[int(batch.kv_indptr[b]) : int(batch.kv_indptr[b + 1])].long()
            ].double()
            own = kv_layer[batch.out_slots[begin:end]].double()
            for i in range(n):
                rows = torch.cat((prefix, own[mask[i]]))
                weights = (q[begin + i].double() @ rows.T * sm_scale).softmax(-1)
                out[begin + i] = (weights @ rows[:, :latent]).to(q.dtype)
        return out

    return attend
