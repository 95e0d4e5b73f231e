"""Number formats of the quantized cache, in integer arithmetic: the same bits on every device, and with no FP8 unit."""

import triton
import triton.language as tl


@triton.jit
def decode_e4m3(byte):
    """Bytes as float16: the fields of e4m3 are those of a float16 whose exponent is 8 lower."""
    wide = byte.to(tl.int16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True) * 256.0


# Said to be impure, so that Triton keeps these in the layout of the loads: in the layout of a product whose operand is
# transposed it would load and convert byte by byte.
@triton.jit
def e4m3_to_float16(byte):
    """Bytes of e4m3 as float16, two by an instruction (from compute capability 8.9 on)."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
        "=r,=r,r", [byte], dtype=tl.float16, is_pure=False, pack=4,
    )  # fmt: skip


@triton.jit
def int8_to_float16(x):
    """int8 as float16: x + 128 is the last byte of 1,152 + x, whose steps are 1."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t, m, c; xor.b32 t, $2, 0x80808080; mov.b32 m, 0x64646464; mov.b32 c, 0xE480E480; "
        "prmt.b32 $0, t, m, 0x4140; prmt.b32 $1, t, m, 0x4342; add.f16x2 $0, $0, c; add.f16x2 $1, $1, c; }",
        "=&r,=&r,r", [x], dtype=tl.float16, is_pure=False, pack=4,
    )  # fmt: skip


@triton.jit
def encode_e4m3(x):
    """float32 of magnitude up to 448 as e4m3 bytes, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    # Below 2**-6 the steps are 2**-9, which is what a sum with 2**14 rounds to.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def round_to_int8(x):
    """float32 of magnitude up to 127 as int8, ties to even: a sum with 1.5 * 2**23 has steps of 1."""
    return ((x + 12582912.0) - 12582912.0).to(tl.int32).to(tl.int8)
