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


def _convert(source: types.Type, target: types.Type, generate: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def convert(_: Any, value: types.Type) -> Any:
        return target(source), lambda context, builder, signature, arguments: generate(builder, arguments[0])

    return convert


def _float_of_half(builder: Any, bits: Any) -> Any:
    return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())


def _half_of_float(builder: Any, value: Any) -> Any:
    return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))


float_of_half = _convert(types.uint16, types.float32, _float_of_half)
_rounded_to_half = _convert(types.float32, types.uint16, _half_of_float)
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


def _product(num_rows: int, lanes: int, is_half: bool) -> Any:
    """y (num_rows, lanes) += x (num_rows, count) @ matrix (count, lanes), given by addresses and strides in bytes.

    As vectors, which the compiler does not make of such loops by itself; it splits them into those of the CPU. Each sum
    runs in the order of the matrix' rows, by fused multiply-adds. See ``add_product`` for ``ahead``.
    """
    word, index, single, byte = ir.IntType(64), ir.IntType(32), ir.FloatType(), ir.IntType(8)
    row_type = ir.VectorType(ir.HalfType() if is_half else single, lanes)
    floats_type = ir.VectorType(single, lanes)
    alignment = 2 if is_half else 4

    @intrinsic
    def product(
        _: Any, x: Any, x_stride: Any, matrix: Any, stride: Any, count: Any, y: Any, y_stride: Any, ahead: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, x_stride, matrix, stride, count, y, y_stride, ahead = arguments

            def at(base: Any, step: Any, place: Any, kind: Any) -> Any:
                return builder.inttoptr(builder.add(base, builder.mul(step, place)), kind.as_pointer())

            fma_type = ir.FunctionType(floats_type, [floats_type] * 3)
            fma = cgutils.get_or_insert_function(builder.module, fma_type, f"llvm.fma.v{lanes}f32")
            results = [at(y, y_stride, ir.Constant(word, row), floats_type) for row in range(num_rows)]
            sums = [cgutils.alloca_once_value(builder, builder.load(result, align=4)) for result in results]
            fetch_type = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), index, index, index])
            fetch = cgutils.get_or_insert_function(builder.module, fetch_type, "llvm.prefetch.p0")
            with cgutils.for_range(builder, count) as loop:
                for line in range(0, lanes * alignment, CACHE_LINE):
                    first = builder.add(builder.add(matrix, ahead), ir.Constant(word, line))
                    place = at(first, stride, loop.index, byte)
                    builder.call(fetch, [place, *(ir.Constant(index, flag) for flag in (0, 3, 1))])  # to read, to keep
                numbers = builder.load(at(matrix, stride, loop.index, row_type), align=alignment)
                if is_half:
                    numbers = builder.fpext(numbers, floats_type)
                for row, total in enumerate(sums):
                    first = builder.add(x, builder.mul(x_stride, ir.Constant(word, row)))
                    factor = builder.load(at(first, ir.Constant(word, 4), loop.index, single))
                    one = builder.insert_element(ir.Constant(floats_type, ir.Undefined), factor, ir.Constant(index, 0))
                    zeros = ir.Constant(ir.VectorType(index, lanes), [0] * lanes)
                    factors = builder.shuffle_vector(one, one, zeros)
                    builder.store(builder.call(fma, [numbers, factors, builder.load(total)]), total)
            for result, total in zip(results, sums, strict=True):
                builder.store(builder.load(total), result, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return product


def add_product(is_half: bool) -> Any:
    """The function y += x @ matrix, where the matrix is of float16 or of float32, the others of float32."""
    size = 2 if is_half else 4
    four, three, two, one = (_product(num_rows, 64, is_half) for num_rows in (4, 3, 2, 1))
    narrow, single = _product(1, 16, is_half), _product(1, 1, is_half)

    @compiled
    def add(
        num_rows: int,
        count: int,
        columns: int,
        x: Address,
        x_stride: int,
        matrix: Address,
        stride: int,
        y: Address,
        y_stride: int,
        ahead: int,
    ) -> None:
        """x (num_rows, count), matrix (count, columns), y (num_rows, columns); strides in bytes.

        ahead: bytes from what is read to what will be read soon, which a CPU fetches by itself within a page only.
        """
        column = 0
        while column + 64 <= columns:
            numbers, row = matrix + column * size, 0
            while row < num_rows:
                left, result = x + row * x_stride, y + row * y_stride + column * 4
                if row + 4 <= num_rows:
                    four(left, x_stride, numbers, stride, count, result, y_stride, ahead)
                elif row + 3 == num_rows:
                    three(left, x_stride, numbers, stride, count, result, y_stride, ahead)
                elif row + 2 == num_rows:
                    two(left, x_stride, numbers, stride, count, result, y_stride, ahead)
                else:
                    one(left, x_stride, numbers, stride, count, result, y_stride, ahead)
                row += 4
            column += 64
        for row in range(num_rows):
            place = column
            while place + 16 <= columns:
                result = y + row * y_stride + place * 4
                narrow(x + row * x_stride, x_stride, matrix + place * size, stride, count, result, y_stride, ahead)
                place += 16
            while place < columns:
                result = y + row * y_stride + place * 4
                single(x + row * x_stride, x_stride, matrix + place * size, stride, count, result, y_stride, ahead)
                place += 1

    return add
