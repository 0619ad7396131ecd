"""What CUDA C++ kernels stand on: compiled, kept on disk and launched, on a GPU or in the emulator.

Every kernel here is written for the purpose; the emulator and the GPU get the same source and must give what numpy or
torch gives.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from deskfleet.engine.cuda import native
from deskfleet.engine.cuda.native import cache, compiler
from deskfleet.errors import EngineError

pytestmark = pytest.mark.filterwarnings("ignore")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="launches on a GPU")

_HEAD = '#include "device.cuh"\n'

_SUMS = """
KERNEL(64, 1) row_sums(const float* x, float* out, int* blocks, u64 stride, int width, float scale, const float* none) {
    SHARED_BYTES(shared);
    __shared__ float of_warps[2];
    float* values = (float*)shared;
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    for (int i = thread; i < WIDTH; i += 64) values[i] = i < width && !none ? x[blockIdx.x * stride + i] : 0.0f;
    __syncthreads();
    float sum = 0.0f;
    for (int i = 63 - thread; i < WIDTH; i += 64) sum += values[i];  // what another thread has written
    for (int other = 16; other > 0; other >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, other);
    if (thread % 32 == 0) of_warps[thread / 32] = sum;
    __syncthreads();
    if (thread == 0) {
        out[blockIdx.x] = (of_warps[0] + of_warps[1]) * scale + SHIFT;
        __threadfence();
        atomicAdd(blocks, 1);
    }
}
"""

_PRODUCT = """
KERNEL(32, 1) product(const u32* a, const u32* b, float* d) {  // a [16, 8], b [8, 8], two numbers a word; d [16, 8]
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    float sums[4];
    for (int i = 0; i < 4; i++) sums[i] = d[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    const u32 *upper = a + g * 8 + t, *lower = upper + 64, *column = b + g * 8 + t;
    MMA(sums, upper[0], lower[0], upper[4], lower[4], column[0], column[4]);
    for (int i = 0; i < 4; i++) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i];
}
"""

_CONVERSIONS = """
KERNEL(128, 1) decode(const u16* codes, u32* out) { out[threadIdx.x] = f16x2_of_low_e4m3x2(codes[threadIdx.x]); }
KERNEL(32, 1) encode(const float* x, u16* codes, u32* wide, int pairs) {
    for (int i = threadIdx.x; i < pairs; i += 32) {
        codes[i] = e4m3x2_of_floats(x[2 * i + 1], x[2 * i]);
        wide[i] = bf16x2_of_floats(x[2 * i + 1], x[2 * i]);
    }
}
KERNEL(32, 1) multiply(const u32* a, const u32* b, u32* out, int words) {
    for (int i = threadIdx.x; i < words; i += 32) out[i] = bf16x2_mul(load_fresh(a + i), load_stream2(b + i).x);
}
"""

_COPIES = """
KERNEL(64, 1) copies(const u8* from, u32* out, int rows) {
    SHARED_BYTES(shared);
    const int row = 32 * (threadIdx.x / 32), lane = threadIdx.x % 32;
    copy_later(shared + threadIdx.x * 16, from + threadIdx.x * 16, (int)threadIdx.x < rows);
    end_copies();
    copy_later(shared + 1024 + threadIdx.x * 16, from, true);
    end_copies();
    wait_for_copies<LEFT_FIRST>();
    __syncthreads();
    u32 plain[4], turned[4];
    load_matrices(plain, shared + (row + lane) * 16);
    load_turned(turned, shared + (row + lane) * 16);
    for (int i = 0; i < 4; i++) {
        out[(row + lane) * 4 + i] = plain[i];
        out[256 + (row + lane) * 4 + i] = turned[i];
    }
    wait_for_copies<LEFT_LAST>();
}
"""


@pytest.fixture(autouse=True)
def kernels_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of compiled kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "deskfleet" / "kernels"


def make(
    folder: Path, text: str, entry: str, device: torch.device, **defines: int | float | str
) -> native.Kernel | native.EmulatedKernel:
    """Kernel `entry` of this text, for this device."""
    file = folder / f"{entry}.cu"  # a file is read once
    file.write_text(_HEAD + text)
    return (native.kernel if device.type == "cuda" else native.emulated)(file, entry, defines)


def test_blocks_warps_shared_memory_and_every_kind_of_argument(tmp_path: Path, device: torch.device) -> None:
    """70 KB of dynamic shared memory, more than a kernel gets unasked; a block of two dimensions."""
    width = 17_500
    kernel = make(tmp_path, _SUMS, "row_sums", device, WIDTH=width, SHIFT=0.5)
    x = torch.randint(-8, 8, (5, width + 3), device=device).float()
    out, blocks = torch.zeros(5, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    for _ in range(2):  # the emulator's blocks run their threads in either order
        kernel.launch(5, (16, 4), 4 * width, [x, out, blocks, ("i64", width + 3), width - 1, 2.0, None])
    assert out.tolist() == (2 * x[:, : width - 1].sum(1) + 0.5).tolist()
    assert blocks.item() == 10


@pytest.mark.parametrize(("name", "dtype"), [("mma_f16", torch.float16), ("mma_bf16", torch.bfloat16)])
def test_products_of_the_tensor_cores(
    tmp_path: Path, device: torch.device, name: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    a, b = torch.randn(16, 16).to(dtype), torch.randn(8, 16).to(dtype)
    a[0, 0], b[1, 1] = 6e-8, 6e-8  # not normal in f16
    d = torch.randn(16, 8)
    found = d.clone().to(device)
    make(tmp_path, _PRODUCT, "product", device, MMA=name).launch(
        1, 32, 0, [a.to(device), b.to(device), found]
    )
    exact = d.double() + a.double() @ b.double().T
    torch.testing.assert_close(found.cpu(), exact.float(), rtol=0.0, atol=2e-5)


def test_conversions_are_those_of_torch(tmp_path: Path, device: torch.device) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    halves = torch.empty(256, dtype=torch.float16, device=device)
    make(tmp_path, _CONVERSIONS, "decode", device).launch(1, 128, 0, [every.to(device), halves])
    assert torch.equal(halves.cpu().nan_to_num(7e4), every.view(torch.float8_e4m3fn).half().nan_to_num(7e4))

    codes = every.view(torch.float8_e4m3fn).float().nan_to_num(0.0)
    between = (codes.sort().values[1:] + codes.sort().values[:-1]) / 2  # ties
    x = torch.cat(
        [codes, between, between * 1.001, torch.randn(500), 2e-3 * torch.randn(500), torch.zeros(2)]
    )
    rounded = torch.empty(len(x), dtype=torch.float8_e4m3fn, device=device)
    wide = torch.empty(len(x), dtype=torch.bfloat16, device=device)
    encode = make(tmp_path, _CONVERSIONS, "encode", device)
    assert len(x) % 2 == 0
    encode.launch(1, 32, 0, [x.to(device), rounded, wide, len(x) // 2])
    assert torch.equal(rounded.view(torch.uint8).cpu(), x.to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(wide.view(torch.int16).cpu(), x.bfloat16().view(torch.int16))

    beyond = torch.tensor(
        [449.0, -1e9, torch.inf, torch.nan]
    )  # codes that torch would make NaN; here they are full
    encode.launch(1, 32, 0, [beyond.to(device), rounded, wide, 2])
    assert rounded[:3].float().tolist() == [448.0, -448.0, 448.0]
    assert rounded[3].float().isnan()


def test_products_of_pairs(tmp_path: Path, device: torch.device) -> None:
    torch.manual_seed(2)
    a, b = (torch.randn(2002).mul(scale).to(torch.bfloat16) for scale in (1.0, 1e-3))
    a[:3] = torch.tensor([300.0, -torch.inf, 1e-4])
    b[:3] = torch.tensor([300.0, 2.0, 1e-3])
    out = torch.empty(2000, dtype=torch.bfloat16, device=device)
    kernel = make(tmp_path, _CONVERSIONS, "multiply", device)
    kernel.launch(1, 32, 0, [a.to(device), b.to(device), out, 1000])
    assert torch.equal(out.cpu(), a[:2000] * b[:2000])


def test_copies_and_the_matrices_that_they_bring(tmp_path: Path, device: torch.device) -> None:
    """Eight matrices of 8 x 8 halves as the tensor cores take them, plain and turned; rows that do not exist."""
    rows = torch.randint(-9999, 9999, (64, 8), dtype=torch.int16)
    out = torch.empty(2, 64, 4, dtype=torch.int32, device=device)
    make(tmp_path, _COPIES, "copies", device, LEFT_FIRST=1, LEFT_LAST=0).launch(
        1, 64, 2048, [rows.to(device), out, 50]
    )
    rows[50:] = 0
    for mine, matrices in zip(out.cpu(), (rows.view(8, 8, 8), rows.view(8, 8, 8).mT), strict=True):
        assert torch.equal(
            mine.view(torch.int16).view(2, 32, 4, 2).transpose(1, 2).reshape(8, 8, 8), matrices
        )


def test_the_emulator_shows_copies_that_nobody_has_waited_for(tmp_path: Path) -> None:
    rows, out = torch.zeros(64, 8, dtype=torch.int16), torch.zeros(2, 64, 4, dtype=torch.int32)
    make(tmp_path, _COPIES, "copies", torch.device("cpu"), LEFT_FIRST=2, LEFT_LAST=0).launch(
        1, 64, 2048, [rows, out, 64]
    )
    assert (out == -1).all()
    (tmp_path / "other").mkdir()
    kernel = make(tmp_path / "other", _COPIES, "copies", torch.device("cpu"), LEFT_FIRST=1, LEFT_LAST=1)
    with pytest.raises(EngineError, match="ends without waiting for its copies"):
        kernel.launch(1, 64, 2048, [rows, out, 64])


def test_the_emulator_shows_a_forgotten_barrier(tmp_path: Path) -> None:
    text = """
    KERNEL(64, 1) turn(float* x) {
        SHARED_BYTES(shared);
        ((float*)shared)[threadIdx.x] = x[threadIdx.x];
        x[threadIdx.x] = ((float*)shared)[(threadIdx.x + 1) % 64];
    }
    """
    kernel = make(tmp_path, text, "turn", torch.device("cpu"))
    x = torch.ones(64)
    kernel.launch(1, 64, 256, [x])
    assert x.isnan().any()


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("if (threadIdx.x == 3) __syncwarp(); else __syncthreads();", "thread 3 in __syncwarp"),
        ("if (threadIdx.x < 4) __shfl_sync(0xf, 1, 9);", "reads lane 9"),
        ("if (threadIdx.x == 5) __syncwarp(0xf);", "thread 5 calls __syncwarp without"),
        ("SHARED_BYTES(shared); shared[100] = 1;", "writes byte 100 of 100 bytes"),
        (
            "float d[4] = {}; if (threadIdx.x < 31) mma_f16(d, 0, 0, 0, 0, 0, 0);",
            "needs all lanes of a warp, not 7fffffff",
        ),
    ],
)
def test_the_emulator_refuses_what_has_no_meaning_on_a_gpu(tmp_path: Path, statement: str, said: str) -> None:
    kernel = make(tmp_path, f"KERNEL(64, 1) wrong() {{ {statement} }}", "wrong", torch.device("cpu"))
    for _ in range(2):  # also after a launch that was broken off
        with pytest.raises(EngineError, match=said):
            kernel.launch(2, 64, 100, [])


def test_threads_that_have_ended_keep_nobody_waiting(tmp_path: Path) -> None:
    text = """
    KERNEL(48, 1) rest(int* out) {
        if (threadIdx.x % 3 == 0) return;
        __syncthreads();
        int sum = __reduce_add_sync(ALL_LANES, (int)threadIdx.x);
        if (__popc(__ballot_sync(ALL_LANES, 1)) < 32) out[threadIdx.x] = sum;
    }
    """
    kernel = make(tmp_path, text, "rest", torch.device("cpu"))
    out = torch.zeros(48, dtype=torch.int32)
    kernel.launch(1, 48, 0, [out])
    alive = [i for i in range(48) if i % 3]
    sums = [sum(i for i in alive if i // 32 == warp) for warp in range(2)]
    assert out.tolist() == [sums[i // 32] if i % 3 else 0 for i in range(48)]


def test_arguments_that_are_not_the_parameters_are_refused(tmp_path: Path, device: torch.device) -> None:
    kernel = make(tmp_path, "KERNEL(32, 1) two(float* x, int n) {}", "two", device)
    x = torch.zeros(1, device=device)
    elsewhere = torch.zeros(1, device="meta")
    for arguments, said in (
        ([x], "takes"),
        ([x, ("i64", 1)], "takes"),
        ([x, 1, 1], "takes fewer arguments"),
        ([x, 2**31], "does not fit"),
        ([x, "1"], "argument 1 of two is a str"),
        ([elsewhere, 1], "argument 0 of two lies on meta"),
    ):
        with pytest.raises(EngineError, match=said):
            kernel.launch(1, 32, 0, arguments)  # type: ignore[arg-type]
    kernel.launch(1, 32, 0, [x, 1])
    with pytest.raises(EngineError, match="two"):
        kernel.launch(1, 2048, 0, [x, 1])


def test_what_a_compiler_says_is_in_the_error(tmp_path: Path, device: torch.device) -> None:
    with pytest.raises(EngineError, match=r"(?s)kernel wrong of wrong.cu does not compile.*undeclared_name"):
        make(tmp_path, "KERNEL(32, 1) wrong() { undeclared_name(); }", "wrong", device)


def test_a_missing_nvrtc_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"(?s)NVRTC.*libnvrtc.so.13.*hint: install a CUDA build of torch"):
        compiler.Compiler(tmp_path / "libnvrtc.so.13")


@pytest.mark.parametrize("damage", [b"", b"\x7fELF and something else", None])
def test_a_damaged_kernel_on_disk_is_compiled_again(
    tmp_path: Path, kernels_cache: Path, device: torch.device, damage: bytes | None
) -> None:
    """None: one byte of it."""
    text = "KERNEL(32, 1) one(int* x) { x[0] += 1; }"
    x = torch.zeros(1, dtype=torch.int32, device=device)
    make(tmp_path, text, "one", device).launch(1, 1, 0, [x])
    (stored,) = kernels_cache.iterdir()
    whole = stored.read_bytes()
    middle = len(whole) // 2
    changed = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :] if damage is None else damage
    stored.unlink()  # what this process has loaded stays as it is
    stored.write_bytes(changed)
    again = tmp_path / "again"
    again.mkdir()
    make(again, text, "one", device).launch(1, 1, 0, [x])
    assert x.item() == 2
    assert [file.name for file in kernels_cache.iterdir()] == [stored.name]
    assert cache.lookup(stored.name) is not None


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        EngineError, match=r"(?s)cannot be kept in .*file/deskfleet/kernels.*hint: set XDG_CACHE_HOME"
    ):
        cache.store("name", b"body")


_STEP = """
KERNEL(256, 1) step(float* x, int n) {
    let_successor_start();
    wait_for_predecessor();
    for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256)
        x[n + i] = load_fresh_f(x + n - 1 - i) + ADDS;
}
"""


@on_gpu
@pytest.mark.parametrize("dependent", [False, True])
def test_a_chain_of_launches_is_the_same_in_a_graph(
    tmp_path: Path, device: torch.device, dependent: bool
) -> None:
    """Each launch reads what other blocks of the one before it have written; one kernel is loaded while capturing."""
    n = 100_000
    kernel = make(tmp_path, _STEP, "step", device, ADDS=1)

    def chain(x: Tensor) -> None:
        for i in range(60):
            adds = kernel if i else native.kernel(tmp_path / "step.cu", "step", {"ADDS": 1.0})
            adds.launch(100, 256, 0, [x[i], n], dependent=dependent)

    x = torch.zeros(61, n, device=device)
    chain(x)
    torch.cuda.synchronize()
    expected = torch.arange(61, device=device).float()[:, None].expand(61, n)
    assert torch.equal(x, expected)
    native.launcher._made.cache_clear()  # the kernel that the capture loads is a new one
    x.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(x)
    for _ in range(3):
        x.zero_()
        graph.replay()
        assert torch.equal(x, expected)


@on_gpu
def test_what_a_kernel_takes(tmp_path: Path, device: torch.device) -> None:
    text = """
    KERNEL(1024, 2) spills(float* x) {
        float held[64];
        for (int i = 0; i < 64; i++) held[i] = x[i];
        for (int i = 0; i < 64; i++) x[i * (int)held[63 - i]] = held[i];
    }
    """
    usage = make(tmp_path, text, "spills", device).usage
    assert 0 < usage.registers <= 32
    assert usage.local_bytes > 0
    usage = make(tmp_path, _SUMS, "row_sums", device, WIDTH=64, SHIFT=0).usage
    assert usage.local_bytes == 0
    assert usage.static_shared_bytes >= 8
