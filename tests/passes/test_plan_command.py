"""`megalatent plan` as a user meets it."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from megalatent.cli import main
from megalatent.passes.costs import Costs
from megalatent.passes.plan import make_plan
from megalatent.passes.plan_csv import read_csv, write_csv
from megalatent.passes.plan_options import apportion
from megalatent.passes.render import render_grid, render_timeline
from megalatent.passes.render_svg import render_svg
from megalatent.passes.simulate import simulate
from megalatent.passes.split import layout, suggest_split
from tests.waiting import HANG

SMALL = ["plan", "--stages", "4", "--micro-batches", "8", "--passes", "2"]


UNIFORM = ["--stages", "2", "--passes", "1,3"]
MIXED = ["--stages", "2", "--micro-batches", "4", "--mixture", "1:0.5,2:0.5"]
SPLIT = ["--suggest-split", "--layers"]


def run_json(capsys, *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_of_a_uniform_plan(capsys):
    found = run_json(capsys, *SMALL)
    assert found["stages"] == 4
    assert found["chunks"] == 1
    assert found["micro_batches"] == 8
    assert found["passes"] == [2] * 8
    assert found["makespan"] == found["lower_bound"] == (16 + 3) * 3
    assert found["flush_makespan"] == 2 * (8 + 3) * 3
    assert found["bubble_fraction"] == pytest.approx(1 - 48 / 57)
    assert found["peak_in_flight"] == [8, 7, 6, 5]
    assert 0 < found["planning_seconds"] < 60
    assert found["strategy"]


def test_mixture_is_divided_or_drawn(capsys):
    base = ["plan", "--stages", "2", "--micro-batches", "32", "--mixture", "1:0.75,2:0.22,3:0.03"]
    passes = run_json(capsys, *base)["passes"]
    assert [passes.count(k) for k in (1, 2, 3)] == [24, 7, 1]


@pytest.mark.parametrize("draw", [None, "batch", "micro_batch"])
def test_passes_are_drawn_as_training_draws_them(capsys, draw):
    """By the sampler that the config of a run makes; its default is the command's."""
    from megalatent.config_latent import PassesConfig
    from megalatent.passes.sampling import PassSampler

    base = ["plan", "--stages", "2", "--micro-batches", "32", "--mixture", "1:0.5,2:0.3,3:0.2"]
    given = [] if draw is None else ["--draw", draw]
    for iteration in range(4):
        arguments = [*base, "--seed", "7", "--iteration", str(iteration), *given]
        sampler = PassSampler(
            [(0, {1: 0.5, 2: 0.3, 3: 0.2})],
            train_iters=100,
            seed=7,
            draw=draw or PassesConfig().draw,
        )
        assert tuple(run_json(capsys, *arguments)["passes"]) == sampler.passes(iteration, 32)


def test_apportion_by_largest_remainder():
    assert apportion({1: 0.75, 2: 0.22, 3: 0.03}, 10) == (1,) * 8 + (2,) * 2
    assert apportion({1: 0.34, 2: 0.33, 3: 0.33}, 6) == (1, 1, 2, 2, 3, 3)
    assert apportion({2: 1.0}, 3) == (2, 2, 2)
    for count in range(1, 60):
        assert len(apportion({1: 0.1, 2: 0.2, 4: 0.7}, count)) == count


def test_costs_from_options_and_file(capsys, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"forward": [1, 2, 1, 1], "head": 3, "hand_over": 0.5}))
    found = run_json(capsys, *SMALL, "--costs", str(file), "--head", "1.5", "--fusion", "0.1")
    assert found["costs"]["forward"] == [1, 2, 1, 1]
    assert found["costs"]["head"] == 1.5
    assert found["costs"]["hand_over"] == 0.5
    assert found["costs"]["fusion"] == 0.1
    assert Costs.from_dict(found["costs"]) == Costs(
        forward=(1, 2, 1, 1), head=1.5, hand_over=0.5, fusion=0.1
    )


def test_csv_is_read_back(capsys, tmp_path):
    file = tmp_path / "plan.csv"
    arguments = ["--stages", "3", "--chunks", "2", "--passes", "1,3,2,1", "--head", "0.5"]
    made = run_json(capsys, "plan", *arguments, "--csv", str(file))
    checked = run_json(capsys, "plan", "--check", str(file), "--head", "0.5", "--stages", "3")
    for name in ("stages", "chunks", "passes", "makespan", "peak_in_flight", "bubble_fraction"):
        assert made[name] == checked[name]
    plan = make_plan(3, 2, (1, 3, 2, 1), costs=Costs(head=0.5))
    assert read_csv(file).actions == plan.actions


def test_evaluation_plan_is_read_back(capsys, tmp_path):
    file = tmp_path / "plan.csv"
    run_json(capsys, *SMALL, "--forward-only", "--csv", str(file))
    assert run_json(capsys, "plan", "--check", str(file))["forward_only"]


@pytest.mark.parametrize("damage", ["drop", "double", "swap", "word", "column", "empty"])
def test_damaged_csv_is_named(capsys, tmp_path, damage):
    file = tmp_path / "plan.csv"
    assert main([*SMALL, "--width", "0", "--csv", str(file)]) == 0
    capsys.readouterr()
    lines = file.read_text().splitlines()
    if damage == "drop":
        del lines[5]
    elif damage == "double":
        lines.append(lines[-1])
    elif damage == "swap":
        rows = list(csv.DictReader(lines))
        first = next(i for i, row in enumerate(rows) if row["kind"] == "F" and row["pass"] == "1")
        last = next(i for i, row in enumerate(rows) if row["kind"] == "B" and row["pass"] == "1")
        lines[first + 1], lines[last + 1] = lines[last + 1], lines[first + 1]
    elif damage == "word":
        lines[4] = lines[4].replace(",", ",x", 2)
    elif damage == "column":
        lines[0] = lines[0].replace("micro_batch", "batch")
    else:
        lines = lines[:1]
    file.write_text("\n".join(lines) + "\n")
    assert main(["plan", "--check", str(file)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "plan.csv" in shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --stages"),
        (["--stages", "4"], "--passes K or --mixture"),
        (["--stages", "4", "--passes", "2"], "give --micro-batches"),
        (["--stages", "4", "--passes", "2", "--mixture", "1:1"], "one of them"),
        (["--stages", "4", "--passes", "1,2", "--micro-batches", "3"], "lists 2 micro-batches"),
        (["--stages", "4", "--passes", "two"], "whole numbers"),
        (["--stages", "4", "--passes", "1,0"], "has 0 passes"),
        (["--stages", "-1", "--passes", "1,2"], "stages is -1"),
        (["--stages", "2", "--micro-batches", "4", "--mixture", "1:0.5"], "sum to"),
        (["--stages", "2", "--micro-batches", "4", "--mixture", "1"], "K:SHARE"),
        (["--stages", "2", "--micro-batches", "4", "--mixture", "1:0.5,1:0.5"], "twice"),
        (["--stages", "2", "--micro-batches", "0", "--passes", "1"], "at least 1"),
        (["--stages", "2", "--passes", "1,3", "--max-in-flight", "2"], "give at least 3"),
        (["--stages", "2", "--passes", "1,3", "--forward", "1,2,3"], "3 entries for 2 stages"),
        (["--stages", "2", "--passes", "1,3", "--head", "much"], "--head is 'much'"),
        (["--stages", "2", "--passes", "1,3", "--backward", "-1"], "not negative"),
        (["--stages", "2", "--passes", "1,3", "--width", "wide"], "--width"),
        (["--stages", "2", "--passes", "1,3", "--seed", "1"], "go with --mixture"),
        (["--stages", "2", "--passes", "1,3", "--layers", "4"], "--suggest-split"),
        (["--stages", "2", "--passes", "1,3", "--suggest-split"], "give --layers"),
        (["--stages", "2", "--passes", "1,3", "--costs", "/no/such.json"], "/no/such.json"),
        (["--stages", "2", "--passes", "1,3", "--svg", "/no/such/dir.svg"], "/no/such/dir.svg"),
        (["--check", "/no/such.csv"], "/no/such.csv"),
        ([*UNIFORM, "--draw", "batch"], "go with --mixture"),
        ([*MIXED, "--draw", "batch"], "go with --seed"),
        ([*MIXED, "--seed", "1", "--draw", "bath"], "--draw"),
        ([*MIXED, "--seed", "1", "--iteration", "1" + "0" * 30], "counts from 0 to 2**63"),
        ([*UNIFORM, "--forward", "1e308", "--backward", "1e308"], "from 1e-100 to 1e+100"),
        ([*UNIFORM, "--forward", "1e-320"], "from 1e-100 to 1e+100"),
        ([*UNIFORM, "--forward", "1e9", "--width", "full"], "give --width N"),
        ([*UNIFORM, "--width", "20000000"], "100000 columns at most"),
        ([*UNIFORM, "--width", "9" * 5000], "100000 columns at most"),
        (["--stages", "2", "--passes", "1", "--micro-batches", "1000000000"], "smaller step"),
        (["--stages", "1000000000", *UNIFORM[2:], *SPLIT, "10"], "smaller step"),
        ([*UNIFORM, *SPLIT, "1000000000"], "from 1 to 10000"),
        ([*UNIFORM, "--svg", "x" * 300], "give a shorter path"),
        ([*UNIFORM, "--svg", "."], "is a directory"),
        (["--stages", "two"], "--stages"),
    ],
)
def test_mistakes_get_one_line(capsys, arguments, message):
    assert main(["plan", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_nothing_is_written_where_one_file_cannot_be(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.csv").write_text("old")
    for last in (["--json", "/no/such/x.json"], ["--json", "."], ["--json", "new.svg"]):
        assert main([*SMALL, "--svg", "new.svg", "--csv", "old.csv", *last]) == 2
        shown = capsys.readouterr()
        assert (shown.out, shown.err.count("\n")) == ("", 1)
        assert [path.name for path in tmp_path.iterdir()] == ["old.csv"]
        assert (tmp_path / "old.csv").read_text() == "old"
    # A longer file that is there is replaced, not written into; devices are written to.
    (tmp_path / "old.csv").write_text("x" * 100_000)
    assert main([*SMALL, "--width", "0", "--csv", "old.csv", "--svg", "/dev/null"]) == 0
    assert read_csv("old.csv").passes == (2,) * 8


def test_a_table_from_excel_is_read(capsys, tmp_path):
    file = tmp_path / "plan.csv"
    made = run_json(capsys, *SMALL, "--csv", str(file))
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    assert run_json(capsys, "plan", "--check", str(file))["makespan"] == made["makespan"]


@pytest.mark.parametrize("option", [["--seed", "1"], ["--iteration", "1"], ["--draw", "batch"]])
def test_check_refuses_what_it_would_ignore(capsys, tmp_path, option):
    file = tmp_path / "plan.csv"
    run_json(capsys, *SMALL, "--csv", str(file))
    assert main(["plan", "--check", str(file), *option]) == 2
    assert f"leave {option[0]} out" in capsys.readouterr().err


def test_costs_of_all_sizes_are_planned(capsys):
    for costs in (
        ["--forward", "1e100", "--backward", "1e-100"],
        ["--forward", "1e-90", "--backward", "1e-90", "--hand-over", "1e90"],
        ["--forward", "0", "--backward", "0"],
    ):
        for width in ("1", "7", "40"):
            assert main([*SMALL, *costs, "--width", width]) == 0
        assert "nan" not in capsys.readouterr().out


def test_cost_files_are_checked(tmp_path):
    from megalatent.errors import UserError

    for text, message in [
        ("{", "no JSON file"),
        ("[1]", "one JSON object"),
        ('{"foward": 1}', "did you mean forward"),
        ('{"head": [1, 2]}', "give one number"),
        ('{"forward": "x"}', "give numbers"),
        ('{"forward": []}', "finite numbers"),
        ('{"forward": 1' + "0" * 400 + "}", "give numbers"),
        ("[" * 100_000, "no JSON file"),
    ]:
        file = tmp_path / "costs.json"
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            Costs.load(file)
    with pytest.raises(UserError, match="must not be negative"):
        make_plan(2, 1, (2, 1), costs=Costs(extra_forward=-3.0))


def test_starts_without_torch():
    code = (
        "import sys; from megalatent.cli import main;"
        "code = main(['plan', '--stages', '4', '--micro-batches', '8', '--passes', '2']);"
        "assert code == 0; assert 'torch' not in sys.modules; assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=HANG)


def test_text_shows_every_stage_and_the_time(capsys):
    assert main([*SMALL, "--width", "57", "--color", "never"]) == 0
    text = capsys.readouterr().out
    rows = re.findall(r"^stage \d \|(.*)\|", text, re.MULTILINE)
    assert len(rows) == 4
    # One column per unit of time: a forward is one column, a backward two.
    assert all(len(row) == 57 for row in rows)
    for row in rows:
        assert [row.count(c) for c in "12ab"] == [8, 8, 16, 16]
    assert "\x1b" not in text
    assert main([*SMALL, "--width", "full", "--color", "always"]) == 0
    colored = capsys.readouterr().out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", colored)
    assert re.findall(r"^stage \d \|(.*)\|", plain, re.MULTILINE) == rows
    assert main([*SMALL, "--width", "0"]) == 0
    assert "stage 0" not in capsys.readouterr().out


def test_long_plans_fit_the_width():
    plan = make_plan(3, 1, (2,) * 40)
    text = render_timeline(plan, simulate(plan), width=50)
    rows = [line for line in text.splitlines() if line.startswith("stage")]
    assert {len(row.split("|")[1]) for row in rows} == {50}


def test_grid_marks_the_stuck_cell():
    plan = make_plan(3, 1, (1, 2, 1))
    text = render_grid(plan, (1, 3))
    action = plan.actions[1][3]
    assert f">{action.kind}{action.micro_batch}.{action.k}<" in text.splitlines()[1]
    assert text.count(">") == 1
    whole = render_grid(plan)
    names = re.findall(r"[FBH]\d+\.\d+", whole)
    assert len(names) == sum(map(len, plan.actions))
    long = make_plan(4, 2, (2,) * 30)
    assert max(map(len, render_grid(long, (2, 100)).splitlines())) < 200


def test_svg_draws_every_action_with_its_details():
    costs = Costs(head=0.5)
    plan = make_plan(3, 2, (1, 2, 1, 2), costs=costs)
    root = ET.fromstring(render_svg(plan, simulate(plan, costs), title="a <plan>", lower_bound=9))
    space = "{http://www.w3.org/2000/svg}"
    groups = root.findall(f"{space}g")
    assert len(groups) == sum(map(len, plan.actions))
    titles = [group.findtext(f"{space}title") or "" for group in groups]
    assert sum(title.startswith("head") for title in titles) == sum(plan.passes)
    assert any("backward, micro-batch 1, pass 2 of 2, chunk 1" in title for title in titles)
    width = float(root.get("width", "0"))
    for rect in root.iter(f"{space}rect"):
        assert float(rect.get("x", "0")) + float(rect.get("width", "0")) <= width + 1e-6
    assert "lower bound" in "".join(root.itertext())


def test_svg_of_a_large_plan_stays_small():
    plan = make_plan(16, 1, (2,) * 400)
    text = render_svg(plan, simulate(plan))
    ET.fromstring(text)
    assert len(text) < 40 * sum(map(len, plan.actions))


def test_suggested_split_beats_the_equal_one(capsys):
    arguments = ["--stages", "8", "--micro-batches", "32", "--suggest-split", "--layers", "24"]
    for passes in ("1", "2", "3"):
        head = ["--passes", passes, "--head-layers", "4.2"]
        split = run_json(capsys, "plan", *arguments, *head)["split"]
        assert split["equal"]["layers"] == [3] * 8
        assert sum(split["suggested"]["layers"]) == 24
        assert split["suggested"]["makespan"] < 0.75 * split["equal"]["makespan"]
        assert split["suggested"]["makespan"] < 1.03 * split["suggested"]["lower_bound"]
    same = run_json(capsys, "plan", *arguments, "--passes", "3", "--head", "4.2")["split"]
    assert same == split
    assert main(["plan", *arguments, "--passes", "2", "--head-layers", "4.2"]) == 0
    assert "pipeline_model_parallel_layout: E" in capsys.readouterr().out


def test_nothing_beats_the_equal_split_of_equal_stages(capsys):
    arguments = ["--stages", "4", "--micro-batches", "8", "--passes", "2", "--layers", "8"]
    assert main(["plan", *arguments, "--suggest-split"]) == 0
    assert "nothing beats the equal split" in capsys.readouterr().out


def test_a_split_that_saves_memory_alone_says_so(capsys):
    arguments = ["--stages", "4", "--micro-batches", "8", "--passes", "2", "--layers", "1"]
    split = run_json(capsys, "plan", *arguments, "--suggest-split")["split"]
    most = [max(split[name]["peak_in_flight"]) for name in ("suggested", "equal")]
    assert split["suggested"]["makespan"] == split["equal"]["makespan"]
    assert most[0] < most[1]
    assert main(["plan", *arguments, "--suggest-split", "--width", "0"]) == 0
    shown = capsys.readouterr().out
    assert "0.0% less" not in shown
    assert f"the same time, and {most[0]} activations at most, not {most[1]}" in shown


@pytest.mark.parametrize(("stages", "chunks", "layers"), [(4, 1, 10), (3, 2, 13), (2, 1, 5)])
def test_layouts_are_what_megatron_reads(stages, chunks, layers):
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    equal, best = suggest_split(
        stages, chunks, (2, 1) * 6, layers, Costs(forward=1.0, backward=2.0, head=9.0)
    )
    for split in (equal, best):
        assert sum(split.layers) == layers
        parsed = PipelineParallelLayerLayout(layout(split.layers), stages)
        parsed.validate_layer_layout(layers, None)
        for index, count in enumerate(split.layers):
            chunk, rank = divmod(index, stages)
            assert parsed.layout[rank][chunk].count(LayerType.decoder) == count


def test_write_csv_has_times(tmp_path):
    plan = make_plan(2, 1, (1, 1))
    write_csv(tmp_path / "plan.csv", plan, simulate(plan))
    with open(tmp_path / "plan.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0] == {
        "rank": "0", "kind": "F", "micro_batch": "0", "pass": "1", "chunk": "0",
        "start": "0", "end": "1",
    }  # fmt: skip
    assert max(float(row["end"]) for row in rows) == simulate(plan).makespan
