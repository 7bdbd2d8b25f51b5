"""`jspec calibrate`, `jspec profile` and `jspec bench --simulate` on a table of 8 words."""

import collections
import functools
import json

import numpy as np
import pytest
from contract.engines import engine
from contract.words import words_tokenizer

from jspec import loading
from jspec.bench import profile as rounds_module
from jspec.bench.traces import save_traces, synthetic_traces
from jspec.buckets import Bucket
from jspec.cli import main
from jspec.commands import calibrate as calibrate_module
from jspec.commands import profile as profile_module
from jspec.schedule import costs as costs_module
from jspec.schedule.calibration_file import load_calibration
from jspec.schedule.costs import Cell, MeasuredCosts, load_costs, save_costs
from jspec.schedule.resolve import resolve_schedule


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as exit_:
        main([str(a) for a in arguments])
    return exit_.value.code or 0


@functools.cache
def words_engine():
    return engine("confident", tokenizer=words_tokenizer(), max_slots=1, chunks=(7,), prefix_cache=False)


def load_words(*_, **__):
    return words_engine()


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    words = ("one", "two", "three", "four", "five")
    path.write_text("".join(json.dumps({"prompt": f"{w} {v}"}) + "\n" for w in words for v in words))
    return path


def test_calibrate_fits_shows_plots_and_writes(monkeypatch, capsys, tmp_path, prompts):
    monkeypatch.setattr(calibrate_module, "load", load_words)
    out, plot, traces = tmp_path / "calibration.json", tmp_path / "plot.png", tmp_path / "traces.jsonl"
    files = ("--output", out, "--plot", plot, "--traces", traces)
    assert (
        run(
            "calibrate",
            "--drafter",
            "x",
            "--prompts",
            prompts,
            "--temperature",
            1,
            "--max-tokens",
            24,
            *files,
        )
        == 0
    )
    calibration = load_calibration(out)
    assert calibration.num_samples > 50
    assert np.mean(calibration.ece_after) <= np.mean(calibration.ece_before)
    assert (calibration.target, calibration.drafter) == ("table of 8 tokens", "drawn")
    assert plot.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "before" in shown and "rounds of 25 prompts" in shown
    assert run("bench", "--simulate", "--traces", traces) == 0
    assert "of the better" in capsys.readouterr().out


def test_calibrate_refuses_before_it_decodes(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(calibrate_module, "load", None)
    assert run("calibrate", "--drafter", "x", "--output", tmp_path / "no" / "file.json") == 2
    assert "output: expected a file in a folder that exists" in capsys.readouterr().err
    assert run("calibrate", "--drafter", "x", "--output", tmp_path / "c.json", "--fit", "guess") == 2
    assert "fit: expected one of grid, likelihood, got 'guess'" in capsys.readouterr().err


def test_calibrate_refuses_a_drafter_without_confidence(monkeypatch, capsys, tmp_path, prompts):
    monkeypatch.setattr(
        calibrate_module,
        "load",
        lambda *_, **__: engine("dense", tokenizer=words_tokenizer(), max_slots=1, chunks=(7,)),
    )
    assert run("calibrate", "--drafter", "x", "--prompts", prompts, "--output", tmp_path / "c.json") == 2
    assert "drafter: expected one that gives confidence, got drawn" in capsys.readouterr().err


def test_profile_measures_every_bucket_and_its_table_runs_the_engine(monkeypatch, capsys, tmp_path, prompts):
    monkeypatch.setattr(profile_module, "load", load_words)
    monkeypatch.setattr(costs_module, "MOST_SPREAD", 1e9)  # rounds of microseconds are nothing but noise
    options = ("--prompts", prompts, "--context", 8, "--repeats", 2, "--rounds", 1)
    assert run("profile", "--drafter", "confident", *options, "--output", tmp_path) == 0
    shown = capsys.readouterr().out
    assert "drafting pays" in " ".join(shown.split())
    costs = load_costs(tmp_path / "confident.json")
    used = words_engine()
    plan = resolve_schedule(
        costs,
        None,
        target=used.method.target.identity,
        drafter=used.method.drafter,
        dtype="float32",
        max_slots=1,
    )
    assert {(c.lanes, c.nodes) for c in costs.cells if not c.chunk} == {
        (b.lanes, b.nodes) for b in used.ladder.scheduled(1)
    }
    assert {c.chunk for c in costs.cells} == {0, 7}
    assert plan.costs is costs
    # Nothing is simulated that the table has no costs of: here, more than one request at a time.
    assert run("bench", "--simulate", "--schedule", tmp_path / "confident.json") == 0
    assert "of the better" in capsys.readouterr().out


def test_bench_refuses_what_it_would_not_look_at(capsys, tmp_path):
    assert run("bench", "--simulate", "--json", tmp_path / "out.json") == 2
    assert "json: expected none with --simulate, got" in capsys.readouterr().err
    assert run("bench", "--simulate", "--draft-length", 3) == 2
    assert "draft_length: expected none with --simulate, got ['3']" in capsys.readouterr().err
    assert run("bench", "--traces", tmp_path / "traces.jsonl") == 2
    assert "traces: expected none without --simulate" in capsys.readouterr().err
    assert run("bench", "--calibration", tmp_path / "calibration.json") == 2
    assert "calibration: expected none without --schedule" in capsys.readouterr().err


def test_traces_of_another_draft_length_than_the_table_are_refused(capsys, tmp_path):
    cells = tuple(
        Cell(lanes=1, nodes=nodes, chunk=0, context=1, seconds=1.0, spread=0.0) for nodes in (1, 2, 3, 4)
    )
    costs = MeasuredCosts(hardware="", target="", drafter="", draft_length=3, dtype="float32", cells=cells)
    save_costs(costs, tmp_path / "costs.json")
    save_traces(synthetic_traces(1, draft_length=2, tokens=4), tmp_path / "traces.jsonl")
    files = ("--schedule", tmp_path / "costs.json", "--traces", tmp_path / "traces.jsonl")
    assert run("bench", "--simulate", *files) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "expected a cost table for the 2 draft tokens of the traces, got one for 3" in told


def test_profile_refuses_to_write_a_noisy_table(monkeypatch, capsys, tmp_path, prompts):
    monkeypatch.setattr(profile_module, "load", load_words)
    monkeypatch.setattr(costs_module, "MOST_SPREAD", 0.0)
    options = ("--prompts", prompts, "--context", 8, "--repeats", 2, "--rounds", 1)
    assert run("profile", "--drafter", "confident", *options, "--output", tmp_path) == 2
    captured = capsys.readouterr()
    assert "not a table to decide on" in " ".join(captured.out.split())
    assert "stop what else runs on the machine" in captured.err
    assert not list(tmp_path.glob("*.json"))


def test_profile_times_noisy_rounds_again(monkeypatch, tmp_path, prompts):
    """Each kind of round is slow the first time, after the one that compiles: three repeats differ, five do not."""
    times: collections.Counter[object] = collections.Counter()

    def timed(session, bucket):
        session.step(bucket)
        times[bucket] += 1
        return 2.0 if times[bucket] == 2 else 1.0

    monkeypatch.setattr(profile_module, "load", load_words)
    monkeypatch.setattr(rounds_module, "_timed", timed)
    options = ("--prompts", prompts, "--context", 8, "--repeats", 3, "--rounds", 1)
    assert run("profile", "--drafter", "confident", *options, "--output", tmp_path) == 0
    costs = load_costs(tmp_path / "confident.json")
    assert {cell.seconds for cell in costs.cells} == {1.0} and not costs.noisy
    assert {times[Bucket(lanes=c.lanes, nodes=c.nodes, chunk=0)] for c in costs.cells if not c.chunk} == {
        6,
        9,
    }


def test_a_calibration_without_a_schedule_is_refused():
    plain = engine("plain")
    with pytest.raises(ValueError, match="calibration: expected None without a schedule"):
        loading.with_drafter(plain, "ngram", calibration="calibration.json")
