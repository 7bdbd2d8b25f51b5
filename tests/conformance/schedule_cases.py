"""Golden cases of the schedule: survival, budget, allotment, cost tables, calibration, the relay.

Each function takes a case folder, reads every size and option from its files, and raises AssertionError
where jspec differs. Their lengths count the anchor and ours do not: `verify_lens` is verify_length + 1.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.verify_cases import _all_rows, _chain, _fields, _verify_chain
from safetensors.numpy import load_file

from jspec.buckets import Bucket
from jspec.coins import Coins
from jspec.drafters.protocol import Text
from jspec.packing import pack
from jspec.round import Dense, OneHot
from jspec.sampling import empty_table
from jspec.schedule.allotment import allot
from jspec.schedule.budget import best_budget
from jspec.schedule.calibration import expected_calibration_error, fit_grid, prefix_outcomes, sigmoid
from jspec.schedule.relay import Relay, with_unknown
from jspec.schedule.survival import Curve, survival_of
from jspec.schedule.tables import fit_additive, lane_sweep, step_table, table_from_json


def run_budget(folder: Path) -> None:
    """`d_budget`: the budget of most tokens per second, the seconds and the speed expected of it."""
    cases = json.loads((folder / "d_budget.json").read_text())
    assert cases, "d_budget: no case in the file"
    for number, case in enumerate(cases):
        name = f"d_budget {number} ({case['note'] or case['table_kind']})"
        alive = np.asarray(case["survival"], np.float32).reshape(len(case["survival"]), -1)
        lanes, table = len(alive), table_from_json(case["table"])
        drafts = alive[:, : case["max_verify_len"] or case["gamma"] + 1]
        choice = best_budget(
            drafts,
            lambda tokens, budgets, lanes=lanes, table=table: table.tokens_per_second(
                tokens, lanes, lanes + budgets
            ),
            epsilon=case["survival_eps"],
        )
        assert choice.budget == case["budget"], f"{name}: budget {choice.budget} is not {case['budget']}"
        seconds = table.seconds(lanes, np.asarray(lanes + choice.budget))
        _close(name, "seconds", seconds, case["predicted_step_seconds"], 1e-9)
        _close(name, "tokens per second", choice.tokens_per_second, case["predicted_theta"], 1e-9)


def run_allotment(folder: Path) -> None:
    """`d_schedule`: how a budget is spread over the lanes, with least, most and epsilon."""
    cases = json.loads((folder / "d_schedule.json").read_text())
    assert cases, "d_schedule: no case in the file"
    shapes = np.array([np.shape(case["survival"]) for case in cases])
    most_lanes, most_drafts = shapes.max(0)
    spread = jax.jit(allot)  # one program for all cases: they are padded to one shape
    for number, case in enumerate(cases):
        name = f"d_schedule {number}"
        alive = np.asarray(case["survival"], np.float32)
        if case["confidence"] is not None:
            product = np.cumprod(np.asarray(case["confidence"], np.float32), axis=1)
            np.testing.assert_allclose(product, alive, rtol=1e-5, atol=1e-7, err_msg=name)
        lanes, drafts = alive.shape
        least, most = case["min_verify_len"], case["max_verify_len"] or drafts + 1
        padded = np.full((most_lanes, most_drafts), np.nan, np.float32)
        padded[:lanes, :drafts] = alive
        index = np.arange(most_lanes, dtype=np.int32)
        lengths = spread(
            jnp.asarray(padded),
            jnp.asarray(np.where(index < lanes, drafts, 0), jnp.int32),
            jnp.asarray(np.where(index < lanes, index, -1), jnp.int32),
            jnp.int32(case["budget"]),
            least=jnp.int32(max(least - 1, 0)),
            most=jnp.int32(most - 1 if least else most_drafts),
            epsilon=jnp.float32(case["survival_eps"]),
        )
        assert not np.asarray(lengths)[lanes:].any(), name
        lengths = np.asarray(lengths)[:lanes]
        # Their least of 0 lets the first draft token that is chosen pay for the anchor.
        ours = lengths + 1 if least else np.clip(lengths, 1, most)
        np.testing.assert_array_equal(ours, case["verify_lens"], err_msg=f"{name}: verify_lens")


def run_layout(folder: Path) -> None:
    """`d_layout`: where the lanes' nodes lie, and which bucket and budget they get.

    Left out is what jspec does not have: lengths to capture a graph with (buckets are warmed up with empty
    lanes), padding given to some request (padding nodes belong to nobody), rows scattered back to a
    stride (rows are read where they lie), offsets into the cache (pages), one tier for several engines.
    """
    groups = json.loads((folder / "d_layout.json").read_text())
    assert groups["layout"] and groups["compact_rows"], "d_layout: no layout in the file"
    packed = _packer(groups["layout"] + groups["compact_rows"])
    for case in groups["layout"]:
        name = f"d_layout {case['verify_lens']}"
        lanes = len(case["verify_lens"])
        nodes = packed(case, np.zeros((lanes, max(case["verify_lens"])), np.int32))
        offsets = np.asarray(nodes.offsets)
        np.testing.assert_array_equal(offsets[: lanes + 1], case["qo_indptr"], err_msg=f"{name}: offsets")
        np.testing.assert_array_equal(offsets[:lanes], case["extend_start_loc"], err_msg=name)
        assert offsets[-1] == case["total"], name
    for case in groups["compact_rows"]:
        name = f"d_layout compact {case['verify_lens']}"
        tokens = np.concatenate([np.asarray(case["anchors"])[:, None], case["draft_tokens"]], axis=1)
        nodes, rows = packed(case, tokens), slice(case["padded_total"])
        np.testing.assert_array_equal(nodes.tokens[rows], case["verify_ids"], err_msg=f"{name}: tokens")
        np.testing.assert_array_equal(nodes.positions[rows], case["positions"], err_msg=f"{name}: positions")
        within = np.where(case["valid"], np.asarray(case["within"]), 0)
        assert nodes.parents is None, f"{name}: expected chains"
        index, offsets = np.arange(case["padded_total"]), np.asarray(nodes.offsets)
        lane = np.searchsorted(offsets[1:-1], index, side="right")
        ours = np.where(case["valid"], index - offsets[lane], 0)
        np.testing.assert_array_equal(ours, within, err_msg=f"{name}: within")
    for case in groups["graph_fill"]:
        floor = max(case["min_verify_len"], 1)
        if floor == 1:
            most = case["bs"] * case["verify_num_draft_tokens"]
            bucket = Bucket(lanes=case["bs"], nodes=min(case["graph_num_tokens"], most), chunk=0)
            assert bucket.budget == case["budget"], f"d_layout graph_fill {case}"


def run_cost_tables(folder: Path) -> None:
    """`d_cost_tables`: look-ups of both kinds of table, how one is assembled, and what is refused."""
    groups = json.loads((folder / "d_cost_tables.json").read_text())
    assert groups["sps_lookup"] and groups["additive"], "d_cost_tables: no table in the file"
    for case in groups["sps_lookup"]:
        table = table_from_json(case["table"])
        _close("sps_lookup", "rates", table.rate(np.asarray(case["query"])), case["sps"], 1e-12)
    for case in groups["additive"]:
        table = table_from_json(case["table"])
        # Their query says lanes and draft tokens, and the vector runs over the draft tokens.
        seconds = [float(table.seconds(lanes, np.asarray(lanes + budget))) for lanes, budget in case["query"]]
        _close("additive", "seconds", seconds, case["seconds"], 1e-9)
        lanes = case["vector_num_requests"]
        vector = table.seconds(lanes, lanes + np.arange(len(case["vector_seconds"])))
        _close("additive", "vector", vector, case["vector_seconds"], 1e-9)
    for case in groups["interp"]:
        table = table_from_json(
            {
                "bias_seconds": 1.0,
                "bs_probes": [1],
                "alpha_seconds": [-1.0],
                "m_probes": case["xs"],
                "theta_seconds": case["ys"],
            }
        )
        np.testing.assert_allclose(table.seconds(1, np.asarray(case["x"])), case["y"], rtol=1e-9, atol=1e-12)
    for case in groups["profile"]:
        assembled = step_table([tuple(probe) for probe in case["probes"]], case.get("max_batch_tokens"))
        assert assembled.to_json() == case["table"], f"profile {case}"
    assert not table_from_json(groups["uninitialized"]).informative
    for values in groups["invalid"]:
        with pytest.raises(ValueError, match="expected"):
            table_from_json(values)


def run_profiler(folder: Path) -> None:
    """`x_misc`: the sweep over lanes, and the additive fit to measured rounds."""
    groups = json.loads((folder / "x_misc.json").read_text())
    for most, sweep in groups["request_count_sweep"].items():
        assert list(lane_sweep(int(most))) == sweep, f"x_misc sweep to {most}"
    for case in groups["additive_fit"]:
        fit = fit_additive(
            [(cell["bs"], cell["M"], cell["T"]) for cell in case["cells"]], bin_width=case["mbin_width"]
        )
        for key, value in case["table"].items():
            np.testing.assert_allclose(fit.table.to_json()[key], value, rtol=1e-6, atol=1e-12, err_msg=key)
        _close("x_misc", "rms", fit.rms_seconds * 1e3, case["rms_ms"], 1e-6)
        _close("x_misc", "r2", fit.r_squared, case["r2"], 1e-9)


def run_cut_acceptance(folder: Path) -> None:
    """`d_accept`: acceptance when not everything is verified, greedy and sampled, and the bonus at the cut."""
    arrays = load_file(folder / "d_accept.safetensors")
    groups = json.loads((folder / "d_accept.json").read_text())
    assert groups["greedy"] and groups["sampling_with_cutoff"], "d_accept: no case in the file"
    for meta in groups["greedy"]:
        name = f"g{meta['id']}"
        case = _fields(arrays, name)
        lanes, width = case["candidates"].shape
        proposal = _chain(case["candidates"][:, 1:], OneHot())
        rows, table = _all_rows(case["target_logits"], lanes), empty_table(lanes, meta["vocab"], 1)
        raw = None
        for part, lengths in (("full", np.full((lanes,), width - 1)), ("cut", case["verify_lens"] - 1)):
            verdict = _verify_chain(proposal, rows, table, verify_lengths=jnp.asarray(lengths, jnp.int32))
            accepted, bonus = np.asarray(verdict.accept_length), np.asarray(verdict.bonus)
            raw = accepted if raw is None else raw
            out = np.concatenate([case["candidates"][:, 1:], np.zeros((lanes, 1), np.int64)], axis=1)
            out[np.arange(lanes), accepted] = bonus
            ours = {
                "raw_correct_len": raw,
                "correct_len": accepted,
                "bonus": bonus,
                "cap_trim_lens": raw - accepted,
                "commit_lens": np.sum(np.asarray(verdict.path) >= 0, axis=1),
                "new_seq_lens": case["prefix_lens"] + accepted + 1,
                "block_accept_lens": raw + 1,
                "out_tokens": out,
            }
            for key, value in case.items():
                if key.startswith(f"{part}."):
                    np.testing.assert_array_equal(
                        ours[key.removeprefix(f"{part}.")], value, err_msg=name + key
                    )
    for meta in groups["sampling_with_cutoff"]:
        name = f"s{meta['id']}"
        case = _fields(arrays, name)
        lanes = case["candidates"].shape[0]
        with np.errstate(divide="ignore"):
            rows = _all_rows(np.log(case["target_probs"]).reshape(-1, meta["vocab"]), lanes)
        proposal = _chain(case["candidates"][:, 1:], Dense(probs=jnp.asarray(case["draft_probs"]), ids=None))
        table = dataclasses.replace(
            empty_table(lanes, meta["vocab"], 1), temperature=jnp.ones((lanes,), jnp.float32)
        )
        coins = Coins(accept=jnp.asarray(case["uniforms"]), bonus=jnp.asarray(case["uniform_final"]))
        full = _verify_chain(proposal, rows, table, coins)
        cut = _verify_chain(
            proposal, rows, table, coins, verify_lengths=jnp.asarray(case["verify_lens"] - 1, jnp.int32)
        )
        raw, accepted = np.asarray(full.accept_length), np.asarray(cut.accept_length)
        np.testing.assert_array_equal(raw, case["raw_correct_len"], err_msg=name)
        np.testing.assert_array_equal(accepted, case["correct_len"], err_msg=name)
        np.testing.assert_array_equal(raw - accepted, case["cap_trim_lens"], err_msg=name)
        np.testing.assert_array_equal(cut.bonus, case["bonus"], err_msg=f"{name}: bonus at the cut")


class Copy:
    """A confidence whose copy to the host is done when the script says so."""

    def __init__(self, values: np.ndarray):
        self.values, self.done = values, True

    def is_ready(self) -> bool:
        return self.done

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self.values


def run_relay(folder: Path) -> None:
    """`d_relay`: which confidence a step may use, whose it is, and the budget that comes of it."""
    cases = json.loads((folder / "d_relay.json").read_text())
    assert cases, "d_relay: no case in the file"
    for case in cases:
        relay = Relay(case["num_slots"], case["gamma"], lag=case["relay_lag"], carry=case["carry_steps"])
        table = table_from_json(case["table"])
        published: list[Copy] = []
        for step in case["script"]:
            name = f"d_relay lag {case['lag_steps_env']}, step {step['step']}"
            slots, current = step["active_slots"], np.asarray(step["generation"])
            for copy in published:
                copy.done = step["copy_done"]
            known = relay.resolve(step["step"], slots)
            assert (known is None) == (step["resolved"] is None), name
            if known is not None:
                np.testing.assert_array_equal(known.rows, step["lagged"]["confidence"], err_msg=name)
                np.testing.assert_array_equal(known.generations, step["lagged"]["generation"], err_msg=name)
                product = np.cumprod(known.rows, axis=1, dtype=np.float32)
                alive = with_unknown(product, known.generations, current[slots])
                np.testing.assert_allclose(alive, step["survival"], rtol=1e-6, err_msg=name)
                lanes = len(slots)
                choice = best_budget(
                    alive,
                    lambda tokens, budgets, lanes=lanes, table=table: table.tokens_per_second(
                        tokens, lanes, lanes + budgets
                    ),
                )
                assert choice.budget == step["budget"], f"{name}: {choice}"
            copy = Copy(np.asarray(step["published_confidence"], np.float32))
            published.append(copy)
            relay.publish(step["step"], slots, current[slots], copy)


def run_temperature_scaling(folder: Path) -> None:
    """`d_sts`: the grid rule, the calibration error, and confidence with temperatures."""
    arrays = load_file(folder / "d_sts.safetensors")
    cases = json.loads((folder / "d_sts.json").read_text())
    assert cases, "d_sts: no case in the file"
    for meta in cases:
        if "temperatures" not in meta:
            for num_bins, expected in meta["ece"].items():
                probs = arrays["ece.probs"].astype(np.float64)
                error = expected_calibration_error(probs, arrays["ece.targets"], int(num_bins))
                np.testing.assert_allclose(error, expected, atol=1e-6, err_msg=f"d_sts: {num_bins} bins")
            continue
        case = _fields(arrays, f"f{meta['id']}")
        _check_fit(case, np.asarray(meta["grid"], np.float32), meta["num_bins"], meta)
    raw, temperatures = arrays["apply.raw"], arrays["apply.temperatures"]
    confidence = sigmoid(raw / temperatures).astype(np.float32)
    np.testing.assert_allclose(confidence, arrays["apply.confidence"], rtol=1e-5)
    proposal = dataclasses.replace(
        _chain(np.zeros(raw.shape, np.int32), OneHot()), confidence=jnp.asarray(sigmoid(raw), jnp.float32)
    )
    curve = Curve(temperatures=tuple(map(float, temperatures)), offsets=(0.0,) * raw.shape[1])
    np.testing.assert_allclose(survival_of(proposal, curve), arrays["apply.survival"], rtol=1e-5, atol=1e-5)


def run_temperature_fit(folder: Path) -> None:
    """A training case of the grid rule: from accepted counts to temperatures."""
    inputs, outputs = load_file(folder / "inputs.safetensors"), load_file(folder / "outputs.safetensors")
    meta = json.loads((folder / "meta.json").read_text())
    draft_length = inputs["logits"].shape[1]
    outcomes = prefix_outcomes(inputs["num_correct_drafts"], draft_length)
    np.testing.assert_array_equal(outcomes, inputs["prefix_mask"])
    _check_fit(inputs, outputs["grid"], meta["num_bins"], outputs)


def _check_fit(case, grid: np.ndarray, num_bins: int, expected) -> None:
    fit = fit_grid(case["logits"], case["prefix_mask"], grid=grid, num_bins=num_bins)
    np.testing.assert_allclose(fit.temperatures, expected["temperatures"], rtol=1e-6)
    np.testing.assert_allclose(fit.ece_before, expected["ece_before"], atol=1e-6)
    np.testing.assert_allclose(fit.ece_after, expected["ece_after"], atol=1e-6)


def _packer(cases: list[dict]):
    """`pack` for chains of all these cases, padded to one shape and so compiled once."""
    most_lanes = max(len(case["verify_lens"]) for case in cases)
    most_width = max(max(case["verify_lens"]) for case in cases)
    room = max(case.get("padded_total", sum(case["verify_lens"])) for case in cases)
    capacity = max(max(case["seq_lens"]) for case in cases) + 2
    program = jax.jit(pack, static_argnums=0)

    def packed(case: dict, tokens: np.ndarray):
        lanes, width = tokens.shape
        verify, context, text = (np.zeros((most_lanes,), np.int32) for _ in range(3))
        verify[:lanes], context[:lanes] = np.asarray(case["verify_lens"]) - 1, case["seq_lens"]
        text = np.zeros((most_lanes, capacity), np.int32)
        text[np.arange(lanes), case["seq_lens"]] = tokens[:, 0]
        drafts = np.zeros((most_lanes, most_width), np.int32)
        drafts[:lanes, : width - 1] = tokens[:, 1:]
        index = np.arange(most_lanes, dtype=np.int32)
        return program(
            Bucket(lanes=most_lanes, nodes=room, chunk=0),
            Text(tokens=jnp.asarray(text), lengths=jnp.asarray(context + 1)),
            jnp.asarray(context),
            jnp.asarray(np.where(index < lanes, index, -1), jnp.int32),
            jnp.asarray(index < lanes, jnp.int32),
            _chain(drafts, OneHot()),
            jnp.asarray(verify),
        )

    return packed


def _close(name: str, what: str, got, expected, rtol: float) -> None:
    np.testing.assert_allclose(got, expected, rtol=rtol, err_msg=f"{name}: {what}")
