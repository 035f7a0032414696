"""The matrix unit of a CPU (Intel AMX, since 2023) in kernels: registers that are tiles, and products of them.

Engine process, CPU; imported only where kernels are compiled, for a CPU that has it. A tile is up to 16 rows of 64
bytes. A product adds left (rows, 32) @ right (32, 16) in bfloat16 to sums (rows, 16) in float32; the right one lies in
memory as (16, 16, 2), pairs of its rows interleaved. A row of sums depends on its row of the left tile alone.
Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.

Kernels work on 32 rows and 32 columns at once: sums in four tiles, two of rows, two of columns.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.torch_core.kernels.language import BFLOAT, CACHE_LINE, Address, compiled, octets, scratch
from engine.torch_core.kernels.layout import TILE_ROWS

# The registers: sums by their row and column, the two left tiles of a product, the two right ones.
SUMS_00, SUMS_01, SUMS_10, SUMS_11, UPPER, LOWER, LEFT, RIGHT = range(8)
TILE = 1024  # bytes of a tile
ROW = 128  # bytes of two sums' row
MOST_ROWS = 2 * TILE_ROWS  # that are computed at once
SUMS = 4 * TILE  # bytes
CONFIGURATION = 64  # bytes
AHEAD = 4096  # bytes: a CPU by itself does not fetch ahead beyond a page

_WORD, _BYTE = ir.IntType(64), ir.IntType(8)
_POINTER = _BYTE.as_pointer()
_ITEMS = {
    "half": ir.HalfType(),
    "single": ir.FloatType(),
    "bfloat": BFLOAT,
    "bits": ir.IntType(16),
    "word": ir.IntType(32),
}


def _call(builder: Any, name: str, arguments: list[Any]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)


def _number(tile: Any) -> Any:
    return ir.Constant(_BYTE, tile.literal_value)


def _moves(name: str) -> Any:
    @intrinsic(prefer_literal=True)
    def move(_: Any, tile: Any, address: Any, stride: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _call(builder, name, [_number(tile), builder.inttoptr(arguments[1], _POINTER), arguments[2]])
            return context.get_dummy_value()

        return types.void(tile, types.int64, types.int64), generate

    return move


# Number of the tile, address of its first row, bytes from one row to the next.
load_tile, store_tile = _moves("tileloadd64"), _moves("tilestored64")


@intrinsic(prefer_literal=True)
def add_tiles(_: Any, sums: Any, left: Any, right: Any) -> Any:
    """Sums += left @ right, tiles by their numbers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _call(builder, "tdpbf16ps", [_number(tile) for tile in (sums, left, right)])
        return context.get_dummy_value()

    return types.void(sums, left, right), generate


def _of_configuration(name: str) -> Any:
    @intrinsic
    def act(_: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _call(builder, name, [builder.inttoptr(arguments[0], _POINTER)])
            return context.get_dummy_value()

        return types.void(types.int64), generate

    return act


save_configuration, load_configuration = _of_configuration("sttilecfg"), _of_configuration("ldtilecfg")


@intrinsic
def fetch(_: Any, address: Any) -> Any:
    """Begin to read a cache line; any address will do."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        flags = [ir.Constant(ir.IntType(32), flag) for flag in (0, 2, 1)]  # to read, into the second cache
        arguments = [builder.inttoptr(arguments[0], _POINTER), *flags]
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0"), arguments)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def interleave(_: Any, first: Any, second: Any, target: Any) -> Any:
    """target (16, 2) bfloat16 = two rows (16,) float16, rounded: a row of a right tile. By their addresses."""
    kind = {name: ir.VectorType(item, TILE_ROWS) for name, item in _ITEMS.items()}

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words = []
        for address in arguments[:2]:
            row = builder.load(builder.inttoptr(address, kind["half"].as_pointer()), align=2)
            rounded = builder.fptrunc(builder.fpext(row, kind["single"]), kind["bfloat"])
            words.append(builder.zext(builder.bitcast(rounded, kind["bits"]), kind["word"]))
        sixteen = ir.Constant(kind["word"], [16] * TILE_ROWS)
        both = builder.or_(words[0], builder.shl(words[1], sixteen))
        builder.store(both, builder.inttoptr(arguments[2], kind["word"].as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@compiled
def configure(num_rows: int) -> None:
    """For 1 to 32 rows of sums and left tiles; right tiles are whole. Whatever is in the registers is lost."""
    place = scratch(CONFIGURATION)
    fields = octets(place, (CONFIGURATION,))
    for i in range(CONFIGURATION):
        fields[i] = 0
    fields[0] = 1  # the only palette there is
    upper, lower = min(num_rows, TILE_ROWS), max(num_rows - TILE_ROWS, 1)
    for tile in range(8):
        fields[16 + 2 * tile] = CACHE_LINE
        fields[48 + tile] = TILE_ROWS
    for tile in (SUMS_00, SUMS_01, UPPER):
        fields[48 + tile] = upper
    for tile in (SUMS_10, SUMS_11, LOWER):
        fields[48 + tile] = lower
    load_configuration(place)


@compiled
def add_product(num_rows: int, count: int, x: Address, stride: int, panel: Address, is_first: bool) -> None:
    """Sums += x (num_rows, 32 * count) bfloat16, rows ``stride`` bytes apart, @ panel (count, 2) right tiles.

    is_first: the panel is read for the first time, and what lies behind it is read next.
    """
    has_lower = num_rows > TILE_ROWS
    for _ in range(count):
        if is_first:
            for line in range(0, 2 * TILE, CACHE_LINE):
                fetch(panel + AHEAD + line)
        load_tile(UPPER, x, stride)
        load_tile(LEFT, panel, CACHE_LINE)
        add_tiles(SUMS_00, UPPER, LEFT)
        load_tile(RIGHT, panel + TILE, CACHE_LINE)
        add_tiles(SUMS_01, UPPER, RIGHT)
        if has_lower:
            load_tile(LOWER, x + TILE_ROWS * stride, stride)
            add_tiles(SUMS_10, LOWER, LEFT)
            add_tiles(SUMS_11, LOWER, RIGHT)
        x += CACHE_LINE
        panel += 2 * TILE


@compiled
def load_sums(num_rows: int, source: Address, stride: int) -> None:
    """Sums = source (num_rows, 32) float32, rows ``stride`` bytes apart: 0 repeats one row."""
    load_tile(SUMS_00, source, stride)
    load_tile(SUMS_01, source + CACHE_LINE, stride)
    if num_rows > TILE_ROWS:
        load_tile(SUMS_10, source + TILE_ROWS * stride, stride)
        load_tile(SUMS_11, source + TILE_ROWS * stride + CACHE_LINE, stride)


@compiled
def store_sums(num_rows: int, output: Address, stride: int) -> None:
    """output (num_rows, 32) float32, rows ``stride`` bytes apart = sums."""
    store_tile(SUMS_00, output, stride)
    store_tile(SUMS_01, output + CACHE_LINE, stride)
    if num_rows > TILE_ROWS:
        store_tile(SUMS_10, output + TILE_ROWS * stride, stride)
        store_tile(SUMS_11, output + TILE_ROWS * stride + CACHE_LINE, stride)
