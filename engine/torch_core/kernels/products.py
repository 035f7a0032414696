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
from engine.torch_core.kernels.layout import GROUP

_WORD, _INDEX, _SINGLE, _BYTE = ir.IntType(64), ir.IntType(32), ir.FloatType(), ir.IntType(8)
_ITEMS = {"float16": (ir.HalfType(), 2), "float32": (_SINGLE, 4), "int8": (_BYTE, 1)}  # of a matrix, and their bytes


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


def block(lanes: int, dtype: str, most_rows: int = 12) -> Block:
    """y (num_rows, lanes) += x (num_rows, count) @ matrix (count, lanes), by addresses, and strides in bytes.

    The matrix is of float16, of float32, or of int8 with the scales (lanes,) bfloat16 of each GROUP of rows before
    them; the others are of float32. At ``fetched`` + i * ``fetch_stride`` lies what will be read soon, as wide as a row
    of the matrix: reading it begins while row i is used, since a CPU does so by itself within a page only. It may lie
    behind the end of memory. ``most_rows`` is an upper limit: each number is code.
    """
    registers = -(-lanes // LANES)
    most_rows = min(most_rows, (NUM_REGISTERS - registers - 1) // registers)  # beside a row of the matrix and one of x
    item, width = _ITEMS[dtype]
    row_type, sums_type = ir.VectorType(item, lanes), ir.VectorType(_SINGLE, lanes)

    def generate_rows(builder: Any, num_rows: int, arguments: Any) -> None:
        count, x, x_stride, matrix, stride, y, y_stride, fetched, fetch_stride = arguments
        fma = _function(builder, "llvm.fma", sums_type, [sums_type] * 3, f".v{lanes}f32")
        fetch = _function(builder, "llvm.prefetch", ir.VoidType(), [_BYTE.as_pointer(), *[_INDEX] * 3], ".p0")
        results = [_at(builder, y, y_stride, ir.Constant(_WORD, row), sums_type) for row in range(num_rows)]
        sums = [cgutils.alloca_once_value(builder, builder.load(result, align=4)) for result in results]

        def add_rows(before: Any, count: Any, matrix: Any, scales: Any) -> None:
            """``before``: rows of the whole matrix before these."""
            with cgutils.for_range(builder, count) as loop:
                index = builder.add(before, loop.index)
                for line in range(0, lanes * width, CACHE_LINE):
                    first = builder.add(fetched, ir.Constant(_WORD, line))
                    place = _at(builder, first, fetch_stride, index, _BYTE)
                    builder.call(
                        fetch, [place, *(ir.Constant(_INDEX, flag) for flag in (0, 2, 1))]
                    )  # to read, into the second cache
                numbers = builder.load(_at(builder, matrix, stride, loop.index, row_type), align=width)
                if dtype == "float16":
                    numbers = builder.fpext(numbers, sums_type)
                if dtype == "int8":
                    numbers = builder.fmul(builder.sitofp(numbers, sums_type), scales)
                for row, total in enumerate(sums):
                    first = builder.add(x, builder.mul(x_stride, ir.Constant(_WORD, row)))
                    factor = builder.load(_at(builder, first, ir.Constant(_WORD, 4), index, _SINGLE))
                    one = builder.insert_element(ir.Constant(sums_type, ir.Undefined), factor, ir.Constant(_INDEX, 0))
                    factors = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_INDEX, lanes), [0] * lanes))
                    builder.store(builder.call(fma, [numbers, factors, builder.load(total)]), total)

        if dtype == "int8":
            _for_groups(builder, lanes, count, matrix, add_rows)
        else:
            add_rows(ir.Constant(_WORD, 0), count, matrix, None)
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


def widening(lanes: int) -> Any:
    """The function target (count, lanes) float32 = matrix (count, lanes) int8, see ``block``, by their addresses."""
    row_type, wide_type = ir.VectorType(_BYTE, lanes), ir.VectorType(_SINGLE, lanes)

    @intrinsic
    def widen(_: Any, count: Any, matrix: Any, target: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            count, matrix, target = arguments

            def widen_rows(before: Any, count: Any, matrix: Any, scales: Any) -> None:
                with cgutils.for_range(builder, count) as loop:
                    source = _at(builder, matrix, ir.Constant(_WORD, lanes), loop.index, row_type)
                    numbers = builder.sitofp(builder.load(source, align=1), wide_type)
                    index = builder.add(before, loop.index)
                    result = _at(builder, target, ir.Constant(_WORD, 4 * lanes), index, wide_type)
                    builder.store(builder.fmul(numbers, scales), result, align=4)

            _for_groups(builder, lanes, count, matrix, widen_rows)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), generate

    return widen


def add_product(dtype: str) -> Callable[..., None]:
    """The function y += x @ matrix for any number of columns, of a matrix of float16 or of float32."""
    _, size = _ITEMS[dtype]
    few, many = block(4 * LANES, dtype, 3), block(2 * LANES, dtype, 6)
    few_lanes, few_rows, add_few = few.lanes, few.most_rows, few.add
    many_lanes, many_rows, add_many = many.lanes, many.most_rows, many.add
    add_narrow, add_single = block(16, dtype, 1).add, block(1, dtype, 1).add

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


def _for_groups(builder: Any, lanes: int, count: Any, matrix: Any, use: Callable[[Any, Any, Any, Any], None]) -> None:
    """``use``, for each group of a matrix of int8: number of rows before it, of its own; where they are; scales."""
    group, halves, words = ir.Constant(_WORD, GROUP), ir.VectorType(ir.IntType(16), lanes), ir.VectorType(_INDEX, lanes)
    num_groups = builder.sdiv(builder.add(count, ir.Constant(_WORD, GROUP - 1)), group)
    with cgutils.for_range(builder, num_groups) as loop:
        before = builder.mul(loop.index, group)
        left = builder.sub(count, before)
        num_rows = builder.select(builder.icmp_signed("<", left, group), left, group)
        place = builder.add(matrix, builder.mul(loop.index, ir.Constant(_WORD, lanes * (2 + GROUP))))
        bits = builder.load(builder.inttoptr(place, halves.as_pointer()), align=2)
        bits = builder.shl(builder.zext(bits, words), ir.Constant(words, [16] * lanes))
        scales = builder.bitcast(bits, ir.VectorType(_SINGLE, lanes))
        use(before, num_rows, builder.add(place, ir.Constant(_WORD, 2 * lanes)), scales)


def _at(builder: Any, base: Any, stride: Any, index: Any, item: Any) -> Any:
    """A pointer to the item at base + stride * index."""
    return builder.inttoptr(builder.add(base, builder.mul(stride, index)), item.as_pointer())
