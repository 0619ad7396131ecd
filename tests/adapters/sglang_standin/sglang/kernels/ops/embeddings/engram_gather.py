"""Rows at raw addresses, as the kernel reads them."""

import ctypes

import torch


def _engram_gather_kernel():
    """Triton's, in SGLang."""


def engram_gather(w, s, ids, out, dim, block, row_lo=0, row_hi=2**62, sort_ids=False):
    for place, row in enumerate(ids.tolist()):
        out[place] = 0
        if row_lo <= row < row_hi:
            local = row - row_lo
            codes = _bytes(w + local * dim, dim).view(torch.float8_e4m3fn).float()
            scales = _bytes(s + local * (dim // block), dim // block).view(torch.float8_e8m0fnu).float()
            out[place] = (codes.unflatten(-1, (-1, block)) * scales.unsqueeze(-1)).flatten()
    return out


def _bytes(address, count):
    return torch.frombuffer(bytearray(ctypes.string_at(address, count)), dtype=torch.uint8)
