"""The tables' seam: names, attributes and order of calls are vLLM 0.33's, the arithmetic is torch on a CPU."""

import ctypes
from types import SimpleNamespace

import torch
from torch import nn

CONFIG = SimpleNamespace()
GROUP = SimpleNamespace(rank=0, world_size=1, dp_size=1)


def get_current_vllm_config():
    return CONFIG


def get_tensor_model_parallel_rank():
    return GROUP.rank


def engram_head_shard_rank():
    return GROUP.rank


def find_next_prime(start, seen_primes):
    raise NotImplementedError


def compute_hash_multipliers(layer_ids, max_ngram_size, compressed_vocab_size):
    raise NotImplementedError


def build_compressed_token_map(tokenizer):
    raise NotImplementedError


def get_accelerator_view_from_cpu_tensor(cpu_tensor):
    return cpu_tensor


def _engram_head_shard_weight_loader(param, loaded_weight):
    param.data.copy_(loaded_weight.narrow(0, param.engram_vocab_start, param.shape[0]))


class _Kernel:
    """Takes what the Triton kernel takes, unsorted."""

    def __getitem__(self, grid):
        return self

    def __call__(self, weight, scales, ids, _dst, out, start, end, num_rows, *_strides, **options):
        first, local_heads = options["HEAD_START"], options["LOCAL_HEADS"]
        dim, block = options["DIM"], options["QUANT_BLOCK"]
        own = ids[:, first : min(first + local_heads, options["TOTAL_HEADS"])].long()
        own = nn.functional.pad(own, (0, local_heads - own.shape[1]), value=-1)
        is_own = (own >= start) & (own < end)
        rows = torch.where(is_own, own - start, 0)
        if options["PEER_ROWS"]:
            size = options["PEER_ROWS"] * (dim + dim // block)
            raw = torch.frombuffer((ctypes.c_uint8 * size).from_address(int(weight[0])), dtype=torch.uint8)
            codes = raw[: options["PEER_ROWS"] * dim].view(-1, dim)[rows]
            exponents = raw[options["PEER_ROWS"] * dim :].view(-1, dim // block)[rows]
        else:
            codes, exponents = weight.view(torch.uint8)[rows], scales[rows]
        codes = torch.where(is_own[..., None], codes, 0)
        exponents = torch.where(is_own[..., None], exponents, 0)
        if options["PACKED"]:
            out.copy_(torch.cat([codes, exponents], dim=-1))
            return
        factors = (exponents.int() << 23).view(torch.float32).repeat_interleave(block, dim=-1)
        out.copy_((codes.view(torch.float8_e4m3fn).float() * factors).bfloat16())


_engram_lookup_kernel = _Kernel()
_engram_lookup_kernel.fn = _Kernel.__call__


class EngramLayout:
    """Rows of every column, given."""

    def __init__(self, layer_ids, num_embeddings, head_dim, primes):
        self.layer_ids, self.num_embeddings = layer_ids, num_embeddings
        self.head_dim, self.primes = head_dim, primes


class NgramHashState(nn.Module):
    """What the real one keeps of a tokenizer."""

    def __init__(self, token_map, pad_id):
        super().__init__()
        self.token_map, self.pad_id = torch.tensor(token_map, dtype=torch.int32), pad_id


class ParallelEngramEmbedding(nn.Module):
    """A rank's columns of one table."""

    _weight_loader = staticmethod(_engram_head_shard_weight_loader)

    def __init__(self, num_embeddings, dim, head_sizes, block_size=32, cpu_offload=False):
        super().__init__()
        self.cpu_offload, self.dp_size, self.tp_size = cpu_offload, GROUP.dp_size, GROUP.world_size
        self.num_embeddings, self.dim, self.block_size = num_embeddings, dim, block_size
        self.n_hash_cols = len(head_sizes)
        self.part_n_hash_cols = -(-self.n_hash_cols // self.tp_size)
        self.head_start = GROUP.rank * self.part_n_hash_cols
        self.vocab_start_idx = sum(head_sizes[: self.head_start])
        self.vocab_end_idx = sum(head_sizes[: self.head_start + self.part_n_hash_cols])
        self.part_num_embeddings = self.vocab_end_idx - self.vocab_start_idx
        self.peer_rows = 0
        self._num_sms = 4
        weight, scales = self._allocate_weights()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
        for param in (self.weight, self.weight_scale_inv):
            param.weight_loader = self._weight_loader
            param.engram_vocab_start = self.vocab_start_idx

    def _allocate_weights(self):
        rows = self.part_num_embeddings
        return (
            torch.empty(rows, self.dim, dtype=torch.float8_e4m3fn),
            torch.empty(rows, self.dim // self.block_size, dtype=torch.uint8),
        )

    def _storage(self):
        return self.weight.data, self.weight_scale_inv.data

    def lookup(self, indices, out, background=False):
        weight, scales = self._storage()
        rows = indices.shape[0] * self.part_n_hash_cols
        if not rows:
            return
        _engram_lookup_kernel[(1,)](
            self.peer_ptrs if self.peer_rows else weight,
            scales,
            indices,
            indices,
            out,
            self.vocab_start_idx,
            self.vocab_end_idx,
            rows,
            *indices.stride(),
            HEAD_START=self.head_start,
            LOCAL_HEADS=self.part_n_hash_cols,
            TOTAL_HEADS=self.n_hash_cols,
            DIM=self.dim,
            QUANT_BLOCK=self.block_size,
            PACKED=out.dtype == torch.uint8,
            PEER_ROWS=self.peer_rows,
        )


class Engram(nn.Module):
    """A layer that makes its table where the real one does."""

    def __init__(self, layout, layer_hash_index):
        super().__init__()
        self.embed_tokens = self._create_embedding(layout, layer_hash_index)

    def _create_embedding(self, layout, layer_hash_index):
        return ParallelEngramEmbedding(
            layout.num_embeddings[layer_hash_index],
            layout.head_dim,
            tuple(size for order in layout.primes[layer_hash_index] for size in order),
            cpu_offload=CONFIG.engram_config.cpu_offload,
        )
