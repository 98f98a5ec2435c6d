"""`torch.compile`: functions that it leaves alone, and modules that it has wrapped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from torch import nn

P = ParamSpec("P")
T = TypeVar("T")


COMPILED_CHILD_NAME = "_orig_mod"
"""`torch.compile` returns a wrapper that contains the original module under this name, which is
therefore a part of the names of its weights."""


def never_compiled(function: Callable[P, T], *, recursive: bool = False) -> Callable[P, T]:
    """Returns the function in a form that torch's compiler never compiles.

    `torch.compiler.disable` does the same, but loads the compiler at once, which takes a second.

    Args:
        function: the function.
        recursive: do not compile the functions that it calls either.
    """
    import torch

    disable: Any = getattr(torch, "_disable_dynamo")  # noqa: B009 - not exported
    uncompiled: Callable[P, T] = disable(function, recursive=recursive)
    return uncompiled


def compile_only_callees(function: Callable[P, T]) -> Callable[P, T]:
    """Makes torch.compile start at the functions that this function calls, and not at this one.

    Use it for a wrapper around a forward pass, for example: the forward pass is compiled, and the
    wrapper is not.

    Where compiled code calls this function, it becomes part of the caller's graph, like any other
    function. (`never_compiled` would split that graph in two.)
    """
    # Torch marks its own functions in this way too, in `torch._dynamo.eval_frame.skip_code`. That
    # module is not used here, because importing it loads the whole compiler.
    from torch._C._dynamo import eval_frame

    frame_api: Any = eval_frame
    if not hasattr(frame_api, "_FrameExecStrategy"):  # torch 2.6
        frame_api.skip_code(function.__code__)
        return function

    for_this_function = frame_api._FrameAction.SKIP
    for_functions_it_calls = frame_api._FrameAction.DEFAULT
    strategy = frame_api._FrameExecStrategy(for_this_function, for_functions_it_calls)
    frame_api.set_code_exec_strategy(function.__code__, strategy)
    return function


def compiler_is_loaded() -> bool:
    """Returns False if nothing can have been compiled in this process yet."""
    return "torch._dynamo" in sys.modules


def outside_compiled_code(function: Callable[P, T]) -> Callable[P, T]:
    """Wraps a function so that neither the function nor what it calls is compiled.

    It is meant for hooks of modules, and for functions that a script calls inside a function which
    it compiles. In `torch.compile(model)` and `model.compile()`, torch would compile the hooks too,
    and again whenever a number changes that a hook has read. Torch excludes the hooks of
    `fully_shard` in the same way.

    Args:
        function: the function.
    """
    run_uncompiled = never_compiled(function, recursive=True)

    # If the compiler is not loaded, nothing can be compiled, so the function is called as it is.
    # The first call of `run_uncompiled` would load the compiler, which takes about a second.
    @compile_only_callees  # `call` itself is not compiled either
    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if compiler_is_loaded():
            return run_uncompiled(*args, **kwargs)
        return function(*args, **kwargs)

    return call


@contextmanager
def compiled_code_runs_eagerly() -> Iterator[None]:
    """A context in which modules and functions that are compiled run as if they were not.

    Use it around calls of a model in a `TorchDispatchMode`. There torch does not compile, and from
    then on it runs the same code eagerly everywhere.
    """
    if not compiler_is_loaded():
        yield
        return

    import torch

    with torch.compiler.set_stance("force_eager"):
        yield


def is_compiled_in_place(module: nn.Module) -> bool:
    """Returns True if `module.compile()` was called."""
    return module._compiled_call_impl is not None


def is_compiled(module: nn.Module) -> bool:
    """Returns True if a module came from `torch.compile(model)`, or was compiled in place."""
    return is_compiled_in_place(module) or COMPILED_CHILD_NAME in module._modules


def without_compile(module: nn.Module) -> nn.Module:
    """Returns the module that was given to `torch.compile`; any other module is returned itself."""
    # Not by `getattr`: wrappers of other kinds pass it on to the module that they contain.
    if COMPILED_CHILD_NAME not in module._modules:
        return module
    inner: nn.Module = module._modules[COMPILED_CHILD_NAME]  # type: ignore[assignment]
    return inner


ATTRIBUTES_OF_COMPILED_MODULES = (
    "_torchdynamo_orig_callable",  # by this one torch recognises a wrapper
    "_torchdynamo_wrapper_id",  # what torch sets together with it
    "get_compiler_config",
)


def let_compile_again(module: nn.Module) -> None:
    """Lets a model that contains compiled modules be compiled as a whole, with all hooks.

    `torch.compile(block)` returns a wrapper, an `OptimizedModule`, which remembers the `forward`
    that `block` has at that time. Where a model with the wrapper in it is compiled, torch would
    compile this old `forward`, without the hooks that `block` has got since then: under
    `fully_shard`, for example, no parameter would be gathered. Without the attributes that are
    removed here, torch treats the wrapper like any other module.

    Args:
        module: the model. It may be a wrapper itself, or contain several. A wrapper also loses its
            method `get_compiler_config`.
    """
    if not compiler_is_loaded():  # nothing can have been compiled
        return

    for part in module.modules():
        is_wrapper = COMPILED_CHILD_NAME in part._modules
        if is_wrapper:
            for name in ATTRIBUTES_OF_COMPILED_MODULES:
                vars(part).pop(name, None)
