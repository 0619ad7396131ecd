"""Parts of the training model against independent oracles: the engine's quantisers, finite differences, plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deskfleet.engine import ops
from deskfleet.engine.ops.quant import _fp4_values
from deskfleet.model.config import ModelConfig
from deskfleet.model.engram import engram_geometry
from deskfleet_engram.hashing import DEAD, hash_ids
from pocket.model import hyper, numerics
from pocket.model.attention import attend
from pocket.model.experts import MoE, dispatch
from pocket.model.indexer import best
from pocket.model.numerics import Numerics
from pocket.model.parts import reset_all
from pocket.sizes import MAX_CHECKPOINT_BYTES, checkpoint_bytes, pocket_config
from pocket.tokenizer import DIRECTORY
from tests.pocket.fixtures_model import config, lively_model, token_map


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 300.0])
def test_quantisers_are_the_engines(size: float) -> None:
    x = (normal(256, 64) * size).to(torch.bfloat16)
    assert torch.equal(numerics.fp8_groups(x), ops.fake_quant_fp8(x))
    assert torch.equal(numerics.fp4_groups(x), ops.fake_quant_fp4_e8m0(x))
    assert torch.equal(numerics.fp4_entries(x), ops.fake_quant_fp4_e4m3(x))


def test_e2m1_rounds_ties_to_even_codes() -> None:
    x = torch.linspace(-6, 6, 4801)  # every tie is among them
    assert torch.equal(numerics.round_e2m1(x), _fp4_values(x))


def test_gradients_pass_quantisers_unchanged() -> None:
    upstream = normal(32, 64, seed=1).to(torch.bfloat16)
    for quantise in (Numerics().fp8_weight, Numerics().fp4_weight, Numerics().entry):
        x = normal(32, 64).requires_grad_()
        quantised = quantise(x)
        assert not torch.equal(quantised.float(), x)
        quantised.backward(upstream)
        assert torch.equal(x.grad, upstream.float())


def test_sinkhorn_is_the_engines_and_its_gradient_is_right() -> None:
    raw, scale, base = normal(8, 24), normal(3, seed=1), normal(24, seed=2)
    ours = hyper.split(raw, scale, base, 4, 20, 1e-6)
    theirs = ops.hc_split(raw, scale, base, copies=4, iterations=20, eps=1e-6)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, atol=2e-6)
    comb = torch.softmax(normal(3, 4, 4).double(), -1).requires_grad_()
    assert torch.autograd.gradcheck(lambda c: hyper._Sinkhorn.apply(c, 20, 1e-6), comb)


def test_both_ways_to_collapse_and_expand_agree() -> None:
    stream, output = normal(8, 4, 16).to(torch.bfloat16), normal(8, 16).to(torch.bfloat16)
    pre, post, comb = normal(8, 4).abs(), normal(8, 4, seed=1).abs(), normal(8, 4, 4).abs()
    for way in (hyper.collapse.__wrapped__, hyper._collapse_eager):
        assert torch.equal(way(stream, pre), ops.hc_collapse(stream, pre))
    expected = ops.hc_expand(output, stream, post, comb)
    for way in (hyper.expand.__wrapped__, hyper._expand_eager):
        ours = way(output, stream, post, comb)
        assert (ours == expected).float().mean() > 0.99  # another order of four terms
        assert torch.allclose(ours.float(), expected.float(), rtol=1e-2)


def test_dispatch_puts_each_choice_in_its_experts_run() -> None:
    chosen = torch.stack(
        [torch.randperm(5, generator=torch.Generator().manual_seed(i))[:2] for i in range(40)]
    )
    routes = dispatch(chosen, 5)
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), routes.ends[:-1]))
    assert (starts % 16 == 0).all()
    for token in range(40):
        for choice in range(2):
            expert, place = chosen[token, choice], routes.place[token, choice]
            assert starts[expert] <= place < routes.ends[expert]
            assert routes.source[place] == token
            assert routes.slot[place] == token * 2 + choice
    assert len(routes.place.unique()) == 80
    assert (routes.source == 40).sum() == len(routes.source) - 80


def test_experts_are_a_plain_loop_with_gradients() -> None:
    moe = MoE(config(), config().layers[0])
    reset_all(moe, 0)
    plain = Numerics(quantised=False)
    x = normal(24, config().hidden_size, seed=9).to(torch.bfloat16).requires_grad_()
    _, chosen, weights = moe.route(x)
    weights = weights.detach().requires_grad_()
    upstream = normal(24, config().hidden_size, seed=3).to(torch.bfloat16)

    def loop() -> torch.Tensor:
        w1, w2, w3 = (getattr(moe.experts, name).weight for name in ("w1", "w2", "w3"))
        s1, s2, s3 = (getattr(moe.shared_experts, name).weight for name in ("w1", "w2", "w3"))
        out = []
        for token in range(len(x)):
            wide = x[token].float()
            total = s2 @ (torch.nn.functional.silu(s1 @ wide) * (s3 @ wide))
            for expert, weight in zip(chosen[token], weights[token], strict=True):
                total = total + weight * (
                    w2[expert] @ (torch.nn.functional.silu(w1[expert] @ wide) * (w3[expert] @ wide))
                )
            out.append(total)
        return torch.stack(out)

    wanted = {"x": x, "weights": weights, "w1": moe.experts.w1.weight, "w2": moe.experts.w2.weight}
    results = []
    for output in (moe.mix(x, chosen, weights, plain), loop()):
        grads = torch.autograd.grad(output, list(wanted.values()), upstream.to(output.dtype))
        results.append((output.float(), *(grad.float() for grad in grads)))
    for name, ours, theirs in zip(("output", *wanted), *results, strict=True):
        assert (ours - theirs).norm() < 2e-2 * theirs.norm(), name


def test_best_breaks_ties_towards_the_lower_place() -> None:
    scores = torch.tensor([[1.0, 3.0, -0.0, 3.0, 0.0, -2.0, 5.0]]).to(torch.bfloat16)
    allowed = torch.tensor([[True, True, True, True, True, True, False]])
    for count, expected in ((1, {1}), (2, {1, 3}), (4, {0, 1, 2, 3}), (7, {0, 1, 2, 3, 4, 5, -1})):
        assert set(best(scores, allowed, count)[0].tolist()) == expected
    random = normal(64, 200).to(torch.bfloat16)
    mask = normal(64, 200, seed=1) > -1
    picks = best(random, mask, 16).sort(-1).values
    assert torch.equal(picks, ops.top_positions(random.masked_fill(~mask, -torch.inf), 16))


def test_attention_is_the_engines() -> None:
    window, length = 8, 32
    query, rows = normal(1, length, 2, 16).to(torch.bfloat16), normal(length, 16, seed=1).to(torch.bfloat16)
    sink = normal(2, seed=2)
    index = torch.arange(length)[:, None] - torch.arange(window).flip(0)
    index = torch.where(index >= 0, index, -1)
    expected = ops.sparse_attention(query[0], [(rows, index)], sink, 0.25)
    dense = (index[..., None] == torch.arange(length)).any(1)
    ours = attend(query, rows[None], dense[None], None, None, sink, 0.25, Numerics(exact=True))
    assert torch.allclose(ours.output[0].float(), expected.float(), atol=2e-2)
    assert (ours.output[0] == expected).float().mean() > 0.8


def test_hashes_are_the_stores() -> None:
    backbone, _ = lively_model()
    geometry = engram_geometry(config())
    assert geometry is not None
    assert backbone.hashes is not None
    ids = torch.randint(3, 700, (2, 96), generator=torch.Generator().manual_seed(4))
    positions = torch.stack((torch.arange(96), torch.cat((torch.arange(48), torch.arange(48)))))
    image = torch.zeros(2, 96, dtype=torch.bool)
    image[0, 20:27] = True
    ours = backbone.hashes(ids, positions, image)
    compressed = token_map()[ids].masked_fill(image, DEAD).numpy().astype(np.int64)
    pad = int(token_map()[config().pad_token_id])
    for row, span in ((0, slice(0, 96)), (1, slice(0, 48)), (1, slice(48, 96))):
        theirs = hash_ids(geometry, compressed[row, span], start=0, position=0, pad_id=pad)
        assert np.array_equal(ours[row, span].numpy(), theirs)


def test_pocket_fits() -> None:
    sizes = checkpoint_bytes(ModelConfig.from_dict(pocket_config(DIRECTORY / "tokenizer.json")))
    assert sizes["total"] <= MAX_CHECKPOINT_BYTES
    assert all(count > 0 for count in sizes.values())
