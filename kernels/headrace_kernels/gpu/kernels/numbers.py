"""Number formats of the quantized cache, in integer arithmetic: the same bits on every device, and with no FP8 unit."""

import triton
import triton.language as tl


@triton.jit
def decode_e4m3(byte):
    """Bytes as float32 of value / 256: the fields of e4m3 are those of a float16 whose exponent is 8 lower."""
    wide = byte.to(tl.int16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


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
