"""Compiles the kernels: from Python by way of numba to one object file for this CPU.

Engine process; imported only where the object file of an earlier start is missing, see ``machine_code.py``.
"""

from __future__ import annotations

import inspect
from typing import Any

from llvmlite import binding
from numba import types

from engine.torch_core.kernels import (
    int8_linear,
    linear,
    lists,
    paged_attention,
    prefill_attention,
    rows,
    tile_attention,
    tile_linear,
)
from engine.torch_core.kernels.layout import DONE_RUNS, HEADER, NEXT_RUN, NEXT_THREAD, NUM_RUNS, NUM_TASKS

# A kernel's worker, which any number of threads run at once on one frame of int64: its header, see ``layout.py``, and
# the kernel's arguments. Some runs have one task more than the others. A function of numba takes two addresses before
# its arguments, of its result and of its exception; kernels have neither.
_WORKER = """
declare i32 @"{function}"(ptr, ptr, i64, i64{argument_types})
define void @"{name}"(ptr %frame) {{
entry:
  %nothing = alloca ptr
  %next_run = getelementptr i64, ptr %frame, i64 {next_run}
  %next_thread = getelementptr i64, ptr %frame, i64 {next_thread}
  %done_runs = getelementptr i64, ptr %frame, i64 {done_runs}
  %slot = atomicrmw add ptr %next_thread, i64 1 seq_cst
{loads}
  br label %take
take:
  %run = atomicrmw add ptr %next_run, i64 1 seq_cst
  %is_left = icmp slt i64 %run, %num_runs
  br i1 %is_left, label %begin, label %done
begin:
  %before = mul i64 %run, %num_tasks
  %through = add i64 %before, %num_tasks
  %first = sdiv i64 %before, %num_runs
  %end = sdiv i64 %through, %num_runs
  %is_any = icmp slt i64 %first, %end
  br i1 %is_any, label %compute, label %finish
compute:
  %task = phi i64 [ %first, %begin ], [ %next, %compute ]
  %status = call i32 @"{function}"(ptr %nothing, ptr %nothing, i64 %task, i64 %slot{arguments})
  %next = add i64 %task, 1
  %is_more = icmp slt i64 %next, %end
  br i1 %is_more, label %compute, label %finish
finish:
  %finished = atomicrmw add ptr %done_runs, i64 1 acq_rel
  br label %take
done:
  ret void
}}
"""
_LOAD = """  %{name}_at = getelementptr i64, ptr %frame, i64 {place}
  %{name} = load i64, ptr %{name}_at"""

_LIST = """
declare i32 @"{function}"(ptr, ptr, i64)
define void @compute_list(ptr %state) {{
  %nothing = alloca ptr
  %address = ptrtoint ptr %state to i64
  %status = call i32 @"{function}"(ptr %nothing, ptr %nothing, i64 %address)
  ret void
}}
"""

C_LIBRARY = {"sqrt"}  # for numbers below 0; the others are an instruction

KERNELS: dict[str, Any] = {
    "add_norm_float32": rows.norm_kernel("float32"),
    "rotate": rows.rotate,
    "linear_float16": linear.linear_kernel("float16"),
    "linear_float32": linear.linear_kernel("float32"),
    "gate_float16": linear.gate_kernel("float16"),
    "gate_float32": linear.gate_kernel("float32"),
    "linear_int8": int8_linear.int8_linear,
    "gate_int8": int8_linear.int8_gate,
    "store_float32": paged_attention.store_kernel("float32"),
    "store_float16": paged_attention.store_kernel("float16"),
    "attend_float32_float32": paged_attention.attend_kernel("float32", "float32"),
    "attend_float16_float32": paged_attention.attend_kernel("float16", "float32"),
    "merge_float32": paged_attention.merge_kernel("float32"),
    "attend_prompt_float32_float32": prefill_attention.attend_prompt_kernel("float32", "float32"),
    "attend_prompt_float16_float32": prefill_attention.attend_prompt_kernel("float16", "float32"),
}
TILE_KERNELS: dict[str, Any] = {  # and those that read their results or write what they read
    "add_norm_bfloat16": rows.norm_kernel("bfloat16"),
    "attend_float16_bfloat16": paged_attention.attend_kernel("float16", "bfloat16"),
    "merge_bfloat16": paged_attention.merge_kernel("bfloat16"),
    "attend_prompt_float16_bfloat16": prefill_attention.attend_prompt_kernel("float16", "bfloat16"),
    "linear_bfloat16": tile_linear.tile_linear,
    "gate_bfloat16": tile_linear.tile_gate,
    "attend_tiles": tile_attention.attend_tiles,
}


def compile_kernels(machine: binding.TargetMachine, with_tiles: bool) -> bytes:
    """An object file with a function ``void name(int64 *frame)`` for each kernel; ``with_tiles``: the CPU has them."""
    whole = _list_function()
    kernels = KERNELS | TILE_KERNELS if with_tiles else KERNELS
    for name, kernel in kernels.items():
        whole.link_in(_worker(name, kernel))
    for function in whole.functions:
        if not function.is_declaration and function.name not in {*kernels, "compute_list"}:
            function.linkage = "private"
    builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(whole, builder)
    called = {function.name for function in whole.functions if function.is_declaration}
    unknown = {name for name in called if not name.startswith("llvm.")} - C_LIBRARY
    if unknown:  # nothing would be there when the file is loaded
        raise RuntimeError(f"kernels call {', '.join(sorted(unknown))}")
    code: bytes = machine.emit_object(whole)
    return code


def _list_function() -> binding.ModuleRef:
    signature = types.void(types.int64)
    lists.compute_list.compile(signature.args)
    return _linked(lists.compute_list, signature, _LIST)


def _worker(name: str, kernel: Any) -> binding.ModuleRef:
    count = len(inspect.signature(kernel.py_func).parameters)
    signature = types.void(*[types.int64] * count)
    kernel.compile(signature.args)
    arguments = [f"a{number}" for number in range(count - 2)]
    places = {"num_tasks": NUM_TASKS, "num_runs": NUM_RUNS} | {name: HEADER + i for i, name in enumerate(arguments)}
    return _linked(
        kernel,
        signature,
        _WORKER,
        name=name,
        next_run=str(NEXT_RUN),
        next_thread=str(NEXT_THREAD),
        done_runs=str(DONE_RUNS),
        argument_types=", i64" * len(arguments),
        loads="\n".join(_LOAD.format(name=field, place=place) for field, place in places.items()),
        arguments="".join(f", i64 %{argument}" for argument in arguments),
    )


def _linked(kernel: Any, signature: Any, text: str, **parts: str) -> binding.ModuleRef:
    """A function that is called from outside, with the compiled one that it calls."""
    text = text.format(function=kernel.overloads[signature.args].fndesc.llvm_func_name, **parts)
    module = binding.parse_assembly(kernel.inspect_llvm(signature.args))
    outer = binding.parse_assembly(text)
    outer.triple = module.triple
    outer.data_layout = module.data_layout
    outer.link_in(module)
    return outer
