"""How threads compute a list of calls together: one leads, the others help where they can.

Engine process, CPU; imported only where kernels are compiled. The leader announces each call by a ticket and computes
runs of its tasks, as does every other thread that finds some left. It waits for runs that others have begun, never for
a thread that has begun none: one that sleeps, or whose core another process has, delays nobody. (OpenMP's barrier after
each call waited for all threads.) No call is in a list twice, so a thread that is late finds nothing to do.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.torch_core.kernels.language import Address, compiled, ints
from engine.torch_core.kernels.layout import (
    CALL,
    CALLS,
    DONE_RUNS,
    HEADER,
    NAP,
    NEXT_ROLE,
    NEXT_RUN,
    NEXT_THREAD,
    NUM_CALLS,
    NUM_RUNS,
    STATE,
    TICKET,
)

OVER = -1  # the ticket after the last call
SPINS = 3000  # some 40 us
NAP_US = 20

_WORD = ir.IntType(64)
_IS_X86 = platform.machine() in ("x86_64", "AMD64")


def _place(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _WORD.as_pointer())


@intrinsic
def load(_: Any, address: Any) -> Any:
    """An int64; what its writer wrote before is seen from here on."""
    return types.int64(types.int64), lambda context, builder, signature, arguments: builder.load_atomic(
        _place(builder, arguments[0]), "acquire", 8
    )


@intrinsic
def store(_: Any, address: Any, value: Any) -> Any:
    """An int64, and before it whatever was written until here."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _place(builder, arguments[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def take(_: Any, address: Any) -> Any:
    """An int64, which is one more for the next thread."""
    return types.int64(types.int64), lambda context, builder, signature, arguments: builder.atomic_rmw(
        "add", _place(builder, arguments[0]), ir.Constant(_WORD, 1), "acq_rel"
    )


@intrinsic
def compute(_: Any, worker: Any, frame: Any) -> Any:
    """Call a kernel's worker, see ``compiler.py``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()])
        function = builder.inttoptr(arguments[0], kind.as_pointer())
        builder.call(function, [builder.inttoptr(arguments[1], ir.IntType(8).as_pointer())])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def spin(_: Any) -> Any:
    """Let a loop that waits cost less."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if _IS_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def sleep(_: Any, usleep: Any) -> Any:
    """By the C library's function at that address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32)])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [ir.Constant(ir.IntType(32), NAP_US)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@compiled
def wait(times: int, usleep: Address) -> int:
    """A moment, and a longer one after many; how many times it has been now."""
    if times < SPINS:
        spin()
    else:
        sleep(usleep)
    return times + 1


@compiled
def lead(calls: Address, num_calls: int, ticket: Address, usleep: Address) -> None:
    """Compute all calls, one after the other."""
    for index in range(num_calls):
        worker, frame, num_threads = ints(calls + index * CALL * 8, (CALL,))
        fields = ints(frame, (HEADER,))
        fields[NEXT_RUN] = fields[NEXT_THREAD] = fields[DONE_RUNS] = 0
        if num_threads > 1:
            store(ticket, index + 1)
        compute(worker, frame)
        times = 0
        while load(frame + DONE_RUNS * 8) < fields[NUM_RUNS]:
            times = wait(times, usleep)
    store(ticket, OVER)


@compiled
def assist(calls: Address, ticket: Address, usleep: Address) -> None:
    """Compute runs of the calls that are announced, until all are over."""
    last = times = 0
    while True:
        number = load(ticket)
        if number == OVER:
            return
        if number == last:
            times = wait(times, usleep)
            continue
        worker, frame, _ = ints(calls + (number - 1) * CALL * 8, (CALL,))
        compute(worker, frame)
        last, times = number, 0


@compiled
def compute_list(state: Address) -> None:
    """What any number of threads run at once; state (STATE,) int64, see ``layout.py``."""
    fields = ints(state, (STATE,))
    if take(state + NEXT_ROLE * 8) == 0:
        lead(fields[CALLS], fields[NUM_CALLS], state + TICKET * 8, fields[NAP])
    else:
        assist(fields[CALLS], state + TICKET * 8, fields[NAP])
