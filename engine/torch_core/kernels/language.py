"""What kernels are written in: Python as numba compiles it, with arrays found by their addresses.

Engine process, CPU; imported only where kernels are compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Sums may be reordered, which makes vectors of them; NaN and infinity mean what they always do.
compiled = njit(fastmath={"reassoc", "contract", "nsz", "arcp"}, error_model="numpy")

CACHE_LINE = 64  # bytes
GREATEST_HALF = np.float32(65504)

Address = int  # int64, as are all sizes
Float = Any  # float32
Array = Any
Bits = Any  # uint16


def _as(item: types.Type) -> Any:
    @intrinsic
    def as_pointer(_: Any, address: types.Type) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(item)))

        return types.CPointer(item)(types.int64), generate

    return as_pointer


_as_floats, _as_halves, _as_ints, _as_words, _as_octets = (
    _as(item) for item in (types.float32, types.uint16, types.int64, types.uint32, types.uint8)
)


@compiled
def floats(address: Address, shape: tuple[int, ...]) -> Array:
    """The float32 array at an address."""
    return carray(_as_floats(address), shape)


@compiled
def halves(address: Address, shape: tuple[int, ...]) -> Array:
    """The float16 or bfloat16 array at an address, as bits in uint16."""
    return carray(_as_halves(address), shape)


@compiled
def ints(address: Address, shape: tuple[int, ...]) -> Array:
    """The int64 array at an address."""
    return carray(_as_ints(address), shape)


@compiled
def words(address: Address, shape: tuple[int, ...]) -> Array:
    """The uint32 array at an address."""
    return carray(_as_words(address), shape)


@compiled
def octets(address: Address, shape: tuple[int, ...]) -> Array:
    """The uint8 array at an address."""
    return carray(_as_octets(address), shape)


@intrinsic(prefer_literal=True)
def scratch(_: Any, size: Any) -> Any:
    """Address of so many bytes, on a cache line, that are the function's until it returns."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        with builder.goto_entry_block():  # ``cgutils.alloca_once`` would fill it, byte by byte
            memory = builder.alloca(ir.ArrayType(ir.IntType(8), size.literal_value))
        memory.align = CACHE_LINE
        return builder.ptrtoint(memory, ir.IntType(64))

    return types.int64(size), generate


def _convert(source: types.Type, target: types.Type, generate: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def convert(_: Any, value: types.Type) -> Any:
        return target(source), lambda context, builder, signature, arguments: generate(builder, arguments[0])

    return convert


def _float_of_half(builder: Any, bits: Any) -> Any:
    return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())


def _half_of_float(builder: Any, value: Any) -> Any:
    return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))


class _Bfloat(ir.Type):  # type: ignore[misc]  # llvmlite has no such type
    def _to_string(self) -> str:
        return "bfloat"


BFLOAT = _Bfloat()


def _bfloat_of_float(builder: Any, value: Any) -> Any:
    return builder.bitcast(builder.fptrunc(value, BFLOAT), ir.IntType(16))


float_of_half = _convert(types.uint16, types.float32, _float_of_half)
_rounded_to_half = _convert(types.float32, types.uint16, _half_of_float)
# By an instruction of CPUs that have a matrix unit; in short loops the compiler does not see vectors of it.
rounded_to_bfloat = _convert(types.float32, types.uint16, _bfloat_of_float)
float_of_bits = _convert(types.int32, types.float32, lambda builder, bits: builder.bitcast(bits, ir.FloatType()))


@intrinsic
def greater(_: Any, first: Any, second: Any) -> Any:
    """Of two float32; NaN, if one is. The compiler makes vectors of a loop of it, which of a comparison it does not."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 2)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.maximum.f32"), arguments)

    return types.float32(types.float32, types.float32), generate


bits_of_float = _convert(types.float32, types.uint32, lambda builder, value: builder.bitcast(value, ir.IntType(32)))
double_of_bits = _convert(types.int64, types.float64, lambda builder, bits: builder.bitcast(bits, ir.DoubleType()))


@compiled
def bfloat_of_float(x: Float) -> Bits:
    """Rounded to the nearest, to the even one between two; as bits in uint16."""
    bits = bits_of_float(x)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(rounded) if x == x else np.uint16(0x7FC0)


@compiled
def half_of_float(x: Float) -> Bits:
    """The nearest one that is finite, so that a value too great spoils no other; NaN stays. As bits in uint16."""
    x = GREATEST_HALF if x > GREATEST_HALF else x
    return _rounded_to_half(-GREATEST_HALF if x < -GREATEST_HALF else x)


@compiled
def _same(x: Float) -> Float:
    return x


# Of an array's dtype: how to view it at an address, bytes of an item, how a float32 becomes one.
DTYPES: dict[str, tuple[Any, int, Any]] = {
    "float32": (floats, 4, _same),
    "float16": (halves, 2, half_of_float),
    "bfloat16": (halves, 2, bfloat_of_float),
}
