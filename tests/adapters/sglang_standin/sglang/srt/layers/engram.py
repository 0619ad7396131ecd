"""Tables, hashing and the embedding over them, with the shapes and names of SGLang's."""

import mmap

import numpy as np
import torch
from sglang.kernels.ops.embeddings.engram_gather import engram_gather
from sglang.srt.environ import envs
from torch import nn

from deskfleet_engram import EngramGeometry, EngramSpec
from deskfleet_engram.tokens import compressed_token_map

BLOCK = 32


def get_parallel():
    raise ValueError("not published")


def get_model():
    raise ValueError("not published")


def _sorted_host_reads(device):
    return False


def compute_hash_multipliers():
    """numpy's generator, in SGLang."""


def compute_engram_hash_ids(tokens, blocked, pad_id, token_map, multipliers, primes, offsets):
    compressed = torch.where(blocked, pad_id, token_map[tokens])
    products = compressed.unsqueeze(1) * multipliers
    rolling, hashes = products[..., 0], []
    for order in range(1, tokens.shape[-1]):
        rolling = rolling ^ products[..., order]
        hashes.append(rolling.unsqueeze(-1) % primes[:, order - 1])
    return torch.cat(hashes, dim=-1) + offsets


class EngramLayout:
    def __init__(self, config):
        names = ("layer_ids", "num_embeddings", "max_ngram_size", "vocab_size", "n_heads", "head_dim")
        names += ("pad_token_id", "compressed_vocab_size")
        values = {name: getattr(config, f"engram_{name}") for name in names}
        values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        self.geometry = EngramGeometry.build(EngramSpec(**values))
        self.layer_ids, self.num_embeddings = values["layer_ids"], values["num_embeddings"]
        self.head_dim, self.max_ngram_size = values["head_dim"], values["max_ngram_size"]

    @classmethod
    def from_config(cls, config):
        return cls(config)

    def column_bounds(self, position):
        return (*self.geometry.offsets[position].tolist(), self.num_embeddings[position])


class EngramHasher(nn.Module):
    def __init__(self, layout, tokenizer, pad_id, compressed_vocab_size):
        super().__init__()
        geometry = layout.geometry
        token_map = np.asarray(compressed_token_map(tokenizer.backend_tokenizer)).astype(np.int64)
        primes = geometry.primes.reshape(len(layout.layer_ids), layout.max_ngram_size - 1, -1)
        self.pad_id, self.max_ngram_size = int(token_map[pad_id]), layout.max_ngram_size
        self.token_map, self.primes = torch.from_numpy(token_map), torch.from_numpy(primes.copy())
        self.multipliers = torch.from_numpy(np.array(geometry.multipliers))
        self.offsets = torch.from_numpy(np.array(geometry.offsets))
        self.history = None

    def init_history(self, num_slots, device):
        self.history = torch.zeros(num_slots + 1, self.max_ngram_size - 1, dtype=torch.int32)

    def hash_windows(self, tokens, blocked):
        params = (self.token_map, self.multipliers, self.primes, self.offsets)
        return compute_engram_hash_ids(tokens, blocked, self.pad_id, *params), tokens


class _HostTable:
    def __init__(self, layout, nbytes, name, group):
        self.layout, self.nbytes, self.group, self.dirty = layout, nbytes, group, False
        self.mm = mmap.mmap(-1, nbytes)
        self.bytes = torch.frombuffer(self.mm, dtype=torch.uint8)
        self.device_ptr = self.bytes.data_ptr()

    def finish_load(self, label):
        self.dirty = False


def shard_range(num_embeddings, column_bounds, tp_rank, tp_size):
    if (len(column_bounds) - 1) % tp_size == 0:
        each = (len(column_bounds) - 1) // tp_size
        return column_bounds[tp_rank * each], column_bounds[(tp_rank + 1) * each]
    return num_embeddings * tp_rank // tp_size, num_embeddings * (tp_rank + 1) // tp_size


class EngramEmbedding(nn.Module):
    def __init__(self, num_embeddings, dim, layer_id, column_bounds):
        super().__init__()
        parallel = get_parallel()
        self.dim, self.tp_size = dim, parallel.tp_size
        self.row_start, end = shard_range(num_embeddings, column_bounds, parallel.tp_rank, self.tp_size)
        self.rows = end - self.row_start
        self.host_table, self._sort_host_reads = None, False
        if envs.SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE.get():
            self._init_host_table(num_embeddings, dim, layer_id)
        else:
            weight = torch.empty(self.rows, dim, dtype=torch.float8_e4m3fn)
            scale = torch.empty(self.rows, dim // BLOCK, dtype=torch.float8_e8m0fnu)
            self.weight = nn.Parameter(weight, requires_grad=False)
            self.scale = nn.Parameter(scale, requires_grad=False)
        self.weight.weight_loader = self.scale.weight_loader = self._load_rows

    def _init_host_table(self, num_embeddings, dim, layer_id):
        split = self.rows * dim
        layout = envs.SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT.get()
        name, nbytes = f"sglang_engram_{layer_id}", split + self.rows * (dim // BLOCK)
        self.host_table = _HostTable(layout, nbytes, name, get_parallel().tp_group)
        weight = self.host_table.bytes[:split].view(torch.float8_e4m3fn).view(self.rows, dim)
        scale = self.host_table.bytes[split:].view(torch.float8_e8m0fnu).view(self.rows, dim // BLOCK)
        self._pointers = (self.host_table.device_ptr, self.host_table.device_ptr + split)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def _load_rows(self, param, loaded_weight):
        param.data.copy_(loaded_weight[self.row_start : self.row_start + self.rows])
        if self.host_table is not None:
            self.host_table.dirty = True

    def finish_load(self, label):
        if self.host_table is not None:
            self.host_table.finish_load(label)

    def new_rows(self, indices):
        return torch.empty(*indices.shape, self.dim, dtype=torch.bfloat16, device=indices.device)

    def _owned_rows(self, indices):
        out = self.new_rows(indices)
        pointers = self._pointers if self.host_table else (self.weight.data_ptr(), self.scale.data_ptr())
        low, high = self.row_start, self.row_start + self.rows
        flat = out.view(-1, self.dim)
        engram_gather(*pointers, indices.reshape(-1), flat, self.dim, BLOCK, row_lo=low, row_hi=high)
        return out


class Engram(nn.Module):
    """Gate and projection, in SGLang."""
