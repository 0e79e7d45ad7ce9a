"""The arms: each differs from the control in exactly what its role says, under a name that lasts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soakrig.bisect.arms import PlannedArm, plan_arms
from soakrig.bisect.variables import Variable, parse_variables
from soakrig.engine.environment import parse_settings
from soakrig.errors import UsageError

THREE = parse_variables(["A=1,0,", "B=,x", '--arg:--c=8,""'])
NAMES = st.sampled_from(["A", "B", "C_1", "--d", "--e-f"])
VALUES = st.lists(
    st.none() | st.sampled_from(["", "0", "1", "a,b", '""', "\\", "x=y"]), min_size=2, max_size=4, unique=True
)


@st.composite
def variables(draw: st.DrawFn) -> tuple[Variable, ...]:
    names = draw(st.lists(NAMES, min_size=1, max_size=5, unique=True))
    return tuple(Variable(name, tuple(draw(VALUES))) for name in names)


def reaches_the_engine(arm: PlannedArm, variable: Variable) -> str | None:
    """The variable's value as the engine's process would have it."""
    if not variable.is_flag:
        return arm.settings.get(variable.name)
    given = [flag for flag in arm.flags if flag.partition("=")[0] == variable.name]
    assert len(given) <= 1
    return given[0].partition("=")[2] if given else None


@given(variables())
def test_each_arm_differs_in_what_its_role_says_and_in_nothing_else(chosen: tuple[Variable, ...]) -> None:
    names = [variable.name for variable in chosen]
    pairs = list(itertools.combinations(names, 2)) if len(names) > 2 else []
    arms = plan_arms(chosen, settings={"FIXED": "1"}, flags=["--fixed=2"], pairs=[(b, a) for a, b in pairs])
    control = arms[0]
    assert len({arm.name for arm in arms}) == len(arms)
    assert all(arm.name.isprintable() for arm in arms)
    by_role = {
        role: [arm for arm in arms if arm.role == role] for role in ("control", "all_off", "one", "add_back", "pair")
    }
    for arm in arms:
        of = set(arm.arm.variables)
        differs = {v.name for v in chosen if reaches_the_engine(arm, v) != reaches_the_engine(control, v)}
        expected = {"control": set(), "all_off": set(names), "one": of}.get(arm.role, set(names) - of)
        assert differs == set(arm.changed(control)) == expected
        assert all(reaches_the_engine(arm, v) == arm.values[v.name] for v in chosen)
        assert arm.settings["FIXED"] == "1"
        assert arm.flags[0] == "--fixed=2"
        assert set(arm.settings) - {"FIXED"} | set(arm.unset) == {v.name for v in chosen if not v.is_flag}
        assert not set(arm.settings) & set(arm.unset)
    assert len(by_role["control"]) == 1
    assert control.arm.variables == ()
    assert [(arm.arm.variables, arm.value) for arm in by_role["one"]] == [
        ((v.name,), o) for v in chosen for o in v.others
    ]
    several = len(names) > 1
    assert [arm.arm.variables for arm in by_role["all_off"]] == ([tuple(names)] if several else [])
    assert [arm.arm.variables for arm in by_role["add_back"]] == ([(name,) for name in names] if several else [])
    assert [arm.arm.variables for arm in by_role["pair"]] == pairs
    for arm in (*by_role["all_off"], *by_role["add_back"], *by_role["pair"]):
        kept = () if arm.role == "all_off" else arm.arm.variables
        assert all(arm.values[v.name] == (v.control if v.name in kept else v.off) for v in chosen)


def test_names_last_when_a_variable_is_added() -> None:
    before = [arm.name for arm in plan_arms(THREE[:2])]
    assert before == ["control", "all-off", "A=0", "A=", "B=x", "back:A", "back:B"]
    after = [arm.name for arm in plan_arms(THREE, pairs=[("--c", "A")])]
    assert [name for name in after if name in before] == before
    assert set(after) - set(before) == {'--c=""', "back:--c", "pair:A+--c"}


def test_unset_means_unset_whatever_the_caller_exported() -> None:
    caller = {"PATH": "/bin", "A": "7", "VLLM_X": "1", "CPU_OFFLOAD_GB": "3", "PYTORCH_ALLOC_CONF": "x", "TZ": "UTC"}
    arms = {arm.name: arm for arm in plan_arms(parse_variables(["A=1,", "TZ=UTC,"]), settings={"F": "2"})}
    assert arms["control"].environment(caller) == {"PATH": "/bin", "TZ": "UTC", "A": "1", "F": "2"}
    assert arms["A="].environment(caller) == {"PATH": "/bin", "TZ": "UTC", "F": "2"}
    assert arms["all-off"].environment(caller) == {"PATH": "/bin", "F": "2"}


@pytest.mark.parametrize(
    ("fixed", "flags", "pairs", "match"),
    [
        (["A=1"], [], [], "A=1 is fixed in every arm, and A=1,0, varies it"),
        ([], ["--no-c"], [], "--no-c is fixed in every arm"),
        ([], [], [("A", "D")], "'D' is none of the variables"),
        ([], [], [("A", "A")], "two different variables were expected"),
        ([], [], [("A", "B"), ("B", "A")], r"B\+A is named twice"),
    ],
)
def test_refuses(fixed: list[str], flags: list[str], pairs: list[tuple[str, str]], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        plan_arms(THREE, settings=parse_settings(fixed), flags=flags, pairs=pairs)


def test_refuses_no_variable_and_a_pair_that_is_the_control() -> None:
    with pytest.raises(UsageError, match="no variable"):
        plan_arms([])
    with pytest.raises(UsageError, match="--c is fixed in every arm"):
        plan_arms(parse_variables(['--arg:--no-c=,""']), flags=["--c"])
    with pytest.raises(UsageError, match="that is the control"):
        plan_arms(THREE[:2], pairs=[("A", "B")])
