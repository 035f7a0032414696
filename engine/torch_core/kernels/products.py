"""y += x @ matrix in vector registers: blocks of rows and columns whose sums need no memory until they are whole.

Engine process, CPU; imported only where kernels are compiled. The compiler does not find such code for a loop by
itself. Each sum runs in the order of the matrix' rows, by fused multiply-adds, whatever block it is part of: a row has
the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.torch_core.kernels.language import CACHE_LINE, Address, compiled

_WORD, _INDEX, _SINGLE, _BYTE = ir.IntType(64), ir.IntType(32), ir.FloatType(), ir.IntType(8)


def _registers() -> tuple[int, int]:
    """How many vector registers the code may use on this CPU, and the float32 numbers of each."""
    features = binding.get_host_cpu_features()
    if features.get("avx512vl"):
        return 32, 16 if features.get("avx512bf16") else 8  # as ``machine_code.py`` has LLVM choose
    return (16, 8) if features.get("avx") else (32, 4)


NUM_REGISTERS, LANES = _registers()


@dataclass(frozen=True)
class Block:
    """A product of so many columns and of 1 to ``most_rows`` rows."""

    lanes: int
    most_rows: int
    add: Any  # num_rows, count, x, x_stride, matrix, stride, y, y_stride, fetched, fetch_stride; see ``block``


def block(lanes: int, is_half: bool, most_rows: int = 12) -> Block:
    """y (num_rows, lanes) += x (num_rows, count) @ matrix (count, lanes), by addresses, and strides in bytes.

    The matrix is of float16 or of float32, the others of float32. At ``fetched`` + i * ``fetch_stride`` lies what will
    be read soon, as wide as a row of the matrix: reading it begins while row i is used, since a CPU does so by itself
    within a page only. It may lie behind the end of memory. ``most_rows`` is an upper limit: each number is code.
    """
    registers = -(-lanes // LANES)
    most_rows = min(most_rows, (NUM_REGISTERS - registers - 1) // registers)  # beside a row of the matrix and one of x
    row_type = ir.VectorType(ir.HalfType() if is_half else _SINGLE, lanes)
    sums_type = ir.VectorType(_SINGLE, lanes)
    width = 2 if is_half else 4

    def generate_rows(builder: Any, num_rows: int, arguments: Any) -> None:
        count, x, x_stride, matrix, stride, y, y_stride, fetched, fetch_stride = arguments
        fma = _function(builder, "llvm.fma", sums_type, [sums_type] * 3, f".v{lanes}f32")
        fetch = _function(builder, "llvm.prefetch", ir.VoidType(), [_BYTE.as_pointer(), *[_INDEX] * 3], ".p0")
        results = [_at(builder, y, y_stride, ir.Constant(_WORD, row), sums_type) for row in range(num_rows)]
        sums = [cgutils.alloca_once_value(builder, builder.load(result, align=4)) for result in results]
        with cgutils.for_range(builder, count) as loop:
            for line in range(0, lanes * width, CACHE_LINE):
                first = builder.add(fetched, ir.Constant(_WORD, line))
                place = _at(builder, first, fetch_stride, loop.index, _BYTE)
                builder.call(
                    fetch, [place, *(ir.Constant(_INDEX, flag) for flag in (0, 2, 1))]
                )  # to read, into the second cache
            numbers = builder.load(_at(builder, matrix, stride, loop.index, row_type), align=width)
            if is_half:
                numbers = builder.fpext(numbers, sums_type)
            for row, total in enumerate(sums):
                first = builder.add(x, builder.mul(x_stride, ir.Constant(_WORD, row)))
                factor = builder.load(_at(builder, first, ir.Constant(_WORD, 4), loop.index, _SINGLE))
                one = builder.insert_element(ir.Constant(sums_type, ir.Undefined), factor, ir.Constant(_INDEX, 0))
                factors = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_INDEX, lanes), [0] * lanes))
                builder.store(builder.call(fma, [numbers, factors, builder.load(total)]), total)
        for result, total in zip(results, sums, strict=True):
            builder.store(builder.load(total), result, align=4)

    @intrinsic
    def add(
        _: Any, num_rows: Any, count: Any, x: Any, x_stride: Any, matrix: Any, stride: Any, y: Any, y_stride: Any,
        fetched: Any, fetch_stride: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            done = builder.append_basic_block("done")
            switch = builder.switch(arguments[0], done)
            for num_rows in range(1, most_rows + 1):
                rows = builder.append_basic_block(f"rows_{num_rows}")
                switch.add_case(ir.Constant(_WORD, num_rows), rows)
                builder.position_at_end(rows)
                generate_rows(builder, num_rows, arguments[1:])
                builder.branch(done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return Block(lanes, most_rows, add)


def add_product(is_half: bool) -> Callable[..., None]:
    """The function y += x @ matrix for any number of columns, of a matrix of float16 or of float32."""
    size = 2 if is_half else 4
    few, many = block(4 * LANES, is_half, 3), block(2 * LANES, is_half, 6)
    few_lanes, few_rows, add_few = few.lanes, few.most_rows, few.add
    many_lanes, many_rows, add_many = many.lanes, many.most_rows, many.add
    add_narrow, add_single = block(16, is_half, 1).add, block(1, is_half, 1).add

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

        ahead: bytes from what is read to what will be read soon.
        """
        column = 0
        while num_rows <= few_rows and column + few_lanes <= columns:
            numbers, result = matrix + column * size, y + column * 4
            add_few(num_rows, count, x, x_stride, numbers, stride, result, y_stride, numbers + ahead, stride)
            column += few_lanes
        while column + many_lanes <= columns:
            numbers, result = matrix + column * size, y + column * 4
            for row in range(0, num_rows, many_rows):
                left, sums, rows = x + row * x_stride, result + row * y_stride, min(num_rows - row, many_rows)
                add_many(rows, count, left, x_stride, numbers, stride, sums, y_stride, numbers + ahead, stride)
            column += many_lanes
        for row in range(num_rows):
            left, place = x + row * x_stride, column
            while place < columns:
                numbers, result = matrix + place * size, y + row * y_stride + place * 4
                if place + 16 <= columns:
                    add_narrow(1, count, left, x_stride, numbers, stride, result, y_stride, numbers + ahead, stride)
                    place += 16
                else:
                    add_single(1, count, left, x_stride, numbers, stride, result, y_stride, numbers + ahead, stride)
                    place += 1

    function: Callable[..., None] = add
    return function


def _function(builder: Any, name: str, result: Any, arguments: list[Any], suffix: str) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name + suffix)


def _at(builder: Any, base: Any, stride: Any, index: Any, item: Any) -> Any:
    """A pointer to the item at base + stride * index."""
    return builder.inttoptr(builder.add(base, builder.mul(stride, index)), item.as_pointer())
