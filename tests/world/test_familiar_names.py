"""Names of other libraries are errors that say what to use, and all that they say exists."""

from __future__ import annotations

import copy
import inspect
import pkgutil
import re

import pytest
import torch

import lockstep
from lockstep import familiar_names, optim, strategies
from lockstep.checkpoint.checkpointer import Checkpoint
from lockstep.errors import UnknownNameError

pytestmark = pytest.mark.unit

OF_INIT = set(inspect.signature(lockstep.init).parameters)
SUBMODULES = {module.name for module in pkgutil.iter_modules(lockstep.__path__)}
TABLES = {**familiar_names.REPLACEMENT_OF_WORLD_NAME, **familiar_names.REPLACEMENT_OF_MODULE_NAME}


def names_of_world(world: lockstep.World) -> set[str]:
    return {name for name in dir(world) if not name.startswith("_")}


def test_every_advice_names_what_exists() -> None:
    with lockstep.init() as world:
        public_names = names_of_world(world)
        for name, code in TABLES.items():
            of_world = re.findall(r"\bworld\.(\w+)", code)
            of_module = re.findall(r"\blockstep\.(\w+)", code)
            assert of_world or of_module, (name, code)
            assert set(of_world) <= public_names, (name, code)
            assert set(of_module) <= set(lockstep.__all__), (name, code)
            assert set(re.findall(r"init\((\w+)=", code)) <= OF_INIT, (name, code)
            assert set(re.findall(r"optim\.(\w+)", code)) <= set(optim.__all__)
            assert set(re.findall(r"strategies\.(\w+)", code)) <= set(strategies.__all__)
            for method in re.findall(r"\)\.(\w+)\(\)", code):
                assert hasattr(Checkpoint, method), (name, code)
        # What is there needs no advice, and what is not there has one.
        assert public_names.isdisjoint(familiar_names.REPLACEMENT_OF_WORLD_NAME)
        known_to_module = set(lockstep.__all__) | SUBMODULES
        assert known_to_module.isdisjoint(familiar_names.REPLACEMENT_OF_MODULE_NAME)
        expected = public_names - known_to_module - set(familiar_names.REPLACEMENT_OF_MODULE_NAME)
        assert set(familiar_names.NAMES_OF_WORLD) == expected


def test_a_name_of_another_library_is_an_error_with_ours() -> None:
    with lockstep.init() as world:
        for name, code in familiar_names.REPLACEMENT_OF_WORLD_NAME.items():
            assert not hasattr(world, name)
            with pytest.raises(UnknownNameError, match=re.escape(f"do:    use {code} instead")):
                getattr(world, name)
            assert getattr(world, name, "nothing") == "nothing"
    with pytest.raises(AttributeError, match=r"use lockstep\.init\(\) instead\n"):
        lockstep.Accelerator()
    with pytest.raises(AttributeError, match=r"use world\.prepare instead, where world = "):
        lockstep.prepare(torch.nn.Linear(1, 1))
    with pytest.raises(AttributeError, match=r"use world\.rank instead, where world = "):
        lockstep.get_rank()


def test_other_names_are_pythons_own_errors() -> None:
    with lockstep.init() as world:
        with pytest.raises(AttributeError) as caught:
            world.prepar(1)
        assert type(caught.value) is AttributeError
        assert (caught.value.name, caught.value.obj) == ("prepar", world)  # for "Did you mean"
        assert copy.copy(world).rank == 0
    # What copying and unpickling ask of an object that has no attributes yet.
    empty = lockstep.World.__new__(lockstep.World)
    assert not hasattr(empty, "__setstate__")
    assert not hasattr(empty, "rank")
    with pytest.raises(AttributeError, match="module 'lockstep' has no attribute 'ini'"):
        lockstep.ini()


def test_a_property_that_fails_keeps_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with lockstep.init() as world:
        monkeypatch.delattr(world._run.step, "number")
        try:
            with pytest.raises(AttributeError, match="'Step' object has no attribute 'number'"):
                world.step  # noqa: B018
        finally:
            monkeypatch.undo()
