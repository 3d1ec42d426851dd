"""Readers against generated truth, damaged input, secrets and the traps that public logs set."""

import gzip
import json
import random
import sqlite3
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench.cli.diagnose import headline
from workbench.diagnose import diagnose, large_text, sglang, sglang_events, vllm
from workbench.diagnose.verdict import read_file
from workbench.measure import trace as traces

SAMPLES = Path(__file__).resolve().parents[2] / "data" / "samples"
INPUTS = sorted(
    p for p in SAMPLES.iterdir() if not p.name.endswith(".expected.json") and p.name != "README.md"
)
SECRETS = ("hf_AbCdEfGhIjKlMnOp", "sk-proj-0123456789abcdef", "hunter2", "203.0.113.77", "/home/alice/models")


def ids(diagnosis):
    return {f.id for f in diagnosis.findings} | {c.id for c in diagnosis.causes if c.likelihood != "excluded"}


def causes(diagnosis):
    return {c.id: c.likelihood for c in diagnosis.causes}


def write(tmp_path, text, name="server.log"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def decode_line(running, flag, accept=None, second=0, prefix=None, end=", ", mark=",", device="cuda"):
    prefix = prefix if prefix is not None else f"[2026-03-01 10:{second // 60:02d}:{second % 60:02d} TP0] "
    speculation = f"accept len: {accept:.2f}, " if accept is not None else ""
    graph = "" if flag is None else f"{device} graph: {flag}, "
    return (
        f"{prefix}Decode batch{mark} #running-req: {running}, #token: 900, token usage: 0.10, "
        f"{speculation}{graph}"
        f"gen throughput (token/s): {100.0 * running:.2f}, #queue-req: 0{end}"
    )


PREFIXES = (
    "[2025-05-31 18:31:21 DP0 TP0] ",
    "[2026-08-23 09:05:37 TP0 EP0] ",
    "2025-12-04 20:35:53 INFO 151972 [scheduler_metrics_mixin.py:287] ",
    "2025-10-20 03:02:22 INFO 31223 [DP3 TP3 EP3 scheduler_metrics_mixin.py:222] ",
    "(SGLangEngine pid=111711, ip=192.0.2.1) [2025-10-31 03:45:20 TP0] ",
    "\x1b[36m(CommandActor pid=105447)\x1b[0m [2026-10-06 11:00:59 TP0 EP0] ",
    "llm0-1  | [2025-07-19 23:29:33] ",
    "2026-09-10T09:00:00+02:00 host python3[1]: ",
    "p0\x1b[2m2026-04-27T23:03:15.250907Z\x1b[0m ",
    "",
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(
        st.tuples(st.integers(1, 300), st.sampled_from([True, False, None]), st.sampled_from(PREFIXES)),
        min_size=1,
        max_size=40,
    ),
    mark=st.sampled_from([",", ".", " [51341],"]),
    end=st.sampled_from(["", ",", ", "]),
    device=st.sampled_from(["cuda", "npu", "cpu", "musa"]),
)
def test_any_prefix_and_grammar_gives_the_counts_that_were_written(tmp_path, lines, mark, end, device):
    text = "\n".join(
        decode_line(n, flag, prefix=prefix, end=end, mark=mark, device=device) for n, flag, prefix in lines
    )
    diagnosis = diagnose([write(tmp_path, text)])
    flags = [flag for _, flag, _ in lines]
    replay = diagnosis.replay
    assert (replay.replayed, replay.eager, replay.unknown) == (
        flags.count(True),
        flags.count(False),
        flags.count(None),
    )
    known = {flag for flag in flags if flag is not None}
    want = {frozenset(): "unknown", frozenset({True}): "all_replayed", frozenset({False}): "all_eager"}
    assert replay.state == want.get(frozenset(known), "mixed")
    assert "truncated_input" not in ids(diagnosis)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(1, 230), flag=st.booleans())
def test_a_cut_line_is_never_read_as_eager_and_never_invents_a_value(tmp_path, cut, flag):
    whole = decode_line(7, flag, accept=2.41, second=1, end="")
    if cut >= len(whole):
        return
    diagnosis = diagnose([write(tmp_path, decode_line(7, True, accept=2.41) + "\n" + whole[:cut])])
    replay = diagnosis.replay
    stated = f"cuda graph: {flag}" in whole[:cut]
    assert replay.eager == (1 if stated and not flag else 0)
    assert diagnosis.mean_accept_len == pytest.approx(2.41)
    if "Decode batch" in whole[:cut]:
        assert replay.replayed + replay.eager + replay.unknown == 2
        assert "truncated_input" in ids(diagnosis)


def test_prose_prefill_and_lower_case_flags_are_no_evidence(tmp_path):
    prefill = (
        "[2026-01-01 00:00:01 TP0] Prefill batch, #new-seq: 1, #new-token: 8, token usage: 0.00, "
        "#running-req: 0, #queue-req: 0, cuda graph: False, input throughput (token/s): 9.00"
    )
    prose = "The log said Decode batch, and then `cuda graph: False`; cuda graph: false is common."
    diagnosis = diagnose([write(tmp_path, f"{prose}\n{prefill}\n" + decode_line(2, True))])
    assert diagnosis.replay.state == "all_replayed" and diagnosis.replay.eager == 0


def capture_line(width, sizes):
    head = "Capture target verify CUDA graph begin. backend=full, "
    return f"{head}num_tokens_per_req={width}, bs={sizes}, avail mem=1 GB"


def test_the_story_36_of_37_lines_names_the_width_and_ranks_no_cause_as_certain(tmp_path):
    capture = capture_line(8, [1, 2, 4, 8])
    lines = [decode_line(1, k == 20, accept=3.1, second=k) for k in range(37)]
    diagnosis = diagnose([write(tmp_path, "\n".join([capture, "speculative_num_draft_tokens=17", *lines]))])
    assert (diagnosis.replay.state, diagnosis.replay.replayed, diagnosis.replay.eager) == ("mixed", 1, 36)
    assert diagnosis.replay.unit == "decode log lines"
    found = causes(diagnosis)
    assert found["verify_width_mismatch"] == "likely" and found["batch_above_captured"] == "excluded"
    assert "stated" not in found.values()


def test_a_capture_list_below_the_batch_is_stated(tmp_path):
    capture = capture_line(4, [1, 2, 4])
    lines = [decode_line(n, n <= 4, accept=2.0, second=n) for n in (1, 2, 4, 6, 8)]
    found = causes(diagnose([write(tmp_path, "\n".join([capture, *lines]))]))
    assert found["batch_above_captured"] == "stated"


def test_disagreeing_ranks_are_named(tmp_path):
    lines = [
        decode_line(4, rank == 0, prefix=f"[2026-03-01 10:00:01 DP{rank} TP{rank}] ") for rank in range(2)
    ]
    assert causes(diagnose([write(tmp_path, "\n".join(lines))]))["ranks_disagree"] == "likely"


def test_pasting_a_log_twice_is_noticed(tmp_path):
    lines = [decode_line(4, True, second=k * 10) for k in range(5)]
    assert {"duplicate_lines", "time_goes_backwards"} <= ids(
        diagnose([write(tmp_path, "\n".join(lines * 2))])
    )


def test_the_counter_of_passes_is_read(tmp_path):
    counts = {"decode_cuda_graph": 1462.0, "decode_none": 18.0}
    text = "\n".join(f'sglang:cuda_graph_passes_total{{mode="{mode}"}} {n}' for mode, n in counts.items())
    replay = diagnose([write(tmp_path, text, "metrics.txt")]).replay
    assert (replay.state, replay.replayed, replay.eager) == ("mixed", 1462, 18)


def test_a_log_that_says_false_beside_a_trace_that_shows_replay(tmp_path):
    log = write(tmp_path, "\n".join(decode_line(1, False, accept=3.0, second=k) for k in range(5)))
    diagnosis = diagnose([log, SAMPLES / "31-kineto-one-graph-decode-step.json.gz"])
    assert (diagnosis.replay.state, diagnosis.replay.unit) == ("unknown", "sources")
    assert [source["replay"]["state"] for source in diagnosis.sources] == ["all_eager", "all_replayed"]
    assert "sources_disagree" in ids(diagnosis)
    flag = {c.id: c for c in diagnosis.causes if not c.source}["flag_not_propagated"]
    assert flag.likelihood == "possible" and "if both are of one run" in flag.why


def test_a_counter_inside_the_log_makes_a_dropped_flag_likely(tmp_path):
    lines = [decode_line(1, False, accept=3.0, second=k) for k in range(5)]
    lines.append('sglang:cuda_graph_passes_total{mode="decode_cuda_graph"} 40.0')
    assert causes(diagnose([write(tmp_path, "\n".join(lines))]))["flag_not_propagated"] == "likely"


def test_one_run_of_many_false_lines_is_not_won_by_a_short_trace(tmp_path):
    log = write(tmp_path, "\n".join(decode_line(1, k == 20, second=k) for k in range(37)))
    diagnosis = diagnose([log, SAMPLES / "31-kineto-one-graph-decode-step.json.gz"])
    replay = diagnosis.replay
    assert (replay.state, replay.replayed, replay.eager) == ("mixed", 1, 36)
    assert "sources_disagree" in ids(diagnosis) and "the sources disagree" in headline(diagnosis)


def test_logs_that_agree_are_added_up_and_keep_their_own_acceptance(tmp_path):
    paths = [
        write(tmp_path, "\n".join([decode_line(1, True, accept=a, second=1)] * n), f"{a}.log")
        for a, n in ((2.0, 3), (4.0, 5))
    ]
    diagnosis = diagnose(paths)
    assert (diagnosis.replay.state, diagnosis.replay.replayed) == ("all_replayed", 8)
    assert "sources_disagree" not in ids(diagnosis) and diagnosis.mean_accept_len is None
    assert [source["acceptance"]["mean_len"] for source in diagnosis.sources] == [2.0, 4.0]
    assert {f.source for f in diagnosis.findings if f.id == "duplicate_lines"} == set(map(str, paths))


def test_few_flags_among_many_lines_say_how_few(tmp_path):
    lines = [decode_line(1, True if k < 2 else None, second=k) for k in range(52)]
    text = headline(diagnose([write(tmp_path, "\n".join(lines))]))
    assert "on the 2 of 52 decode log lines that tell, 50 unknown" in text


@pytest.mark.parametrize(
    ("raw", "name", "seen"),
    [
        (b"", "empty.log", "the file is empty"),
        (b" \n\n", "blank.log", "nothing but white space"),
        (random.Random(5).randbytes(5000), "noise.bin", "binary data"),
        (b"hello\nworld\n", "story.txt", "2 lines of text"),
        (b"PK\x03\x04" + bytes(50), "logs.zip", "a zip archive"),
        (b"just text\n", "text.gz", "no gzip archive"),
        (gzip.compress(random.Random(6).randbytes(9000))[:-4000], "cut.gz", "archive is cut"),
        (b'{"traceEvents": [{"ph": "X"', "cut.json", "the trace is cut or damaged"),
    ],
)
def test_what_is_not_recognised_is_described_with_its_file(tmp_path, raw, name, seen):
    path = write(tmp_path, raw, name)
    diagnosis = diagnose([path])
    assert headline(diagnosis) == f"nothing recognised in {path}"
    assert any(text.startswith(f"{path}: ") and seen in text for text in diagnosis.warnings)


def test_latin_logs_and_progress_bars_are_text(tmp_path):
    text = "caf\xe9 \x1b[31mrot\x1b[0m \b\b 50%\r100%\r\n" * 40 + decode_line(2, True)
    assert diagnose([write(tmp_path, text.encode("latin-1"))]).replay.replayed == 1


def vllm_table(rows):
    head = "CUDAGraph Stats:\n| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |\n"
    return head + "\n".join(f"| {u} | {p} | {p - u} | {mode} | {n} |" for u, p, mode, n in rows)


def test_vllm_rows_are_counted_by_their_counts(tmp_path):
    settings_text = "- Mode: FULL_AND_PIECEWISE\n- Capture sizes: [1, 2, 4, 8]\n"
    diagnosis = diagnose(
        [
            write(
                tmp_path,
                settings_text + vllm_table([(1, 1, "FULL", 31), (3, 3, "NONE", 4), (415, 415, "NONE", 1)]),
            )
        ]
    )
    replay = diagnosis.replay
    assert (replay.state, replay.replayed, replay.eager) == ("mixed", 31, 4)
    assert "padding_gap" in ids(diagnosis)


def test_nsys_csv_and_renamed_launches(tmp_path):
    text = (
        "cuda_api_sum\n\n"
        '"Time (%)","Total Time (ns)","Num Calls","Avg (ns)","Med (ns)",'
        '"Min (ns)","Max (ns)","StdDev (ns)","Name"\n'
        '79.0,900000000,1,1,1,1,1,1,"cudaProfilerStart"\n'
        '10.0,1000,127,1,1,1,1,1,"cudaGraphLaunch_v10000_ptsz"\n'
        '5.0,500,30,1,1,1,1,1,"cuLaunchKernelEx_ptsz"\n3.0,300,20,1,1,1,1,1,"cudaLaunchKernelExC_v11060"\n'
        '1.0,100,7,1,1,1,1,1,"cudaLaunchCooperativeKernel"\n'
    )
    summary = diagnose([write(tmp_path, text, "api.csv")]).sources[0]["summary"]
    assert (summary["graph_launches"], summary["eager_launches"]) == (127, 57)


def make_export(path, node_column=True, secret=True):
    connection = sqlite3.connect(path)
    columns = "start INTEGER, end INTEGER, correlationId INTEGER" + (
        ", graphNodeId INTEGER" if node_column else ""
    )
    connection.executescript(
        "CREATE TABLE StringIds (id INTEGER, value TEXT);"
        f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({columns});"
        "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME"
        " (start INTEGER, end INTEGER, correlationId INTEGER, nameId INTEGER);"
        "CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT);"
        "INSERT INTO StringIds VALUES (1, 'cudaGraphLaunch_v10000'), (2, 'cudaLaunchKernel_v7000');"
        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (0, 1, 10, 1), (5, 6, 11, 2);"
    )
    if secret:
        connection.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('ENV', ?)", (SECRETS[0],))
    for k in range(50):
        connection.execute(
            f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({k * 10}, {k * 10 + 9}, 10"
            + (f", {k + 1})" if node_column else ")")
        )
    connection.execute(
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (600, 601, 11" + (", NULL)" if node_column else ")")
    )
    connection.commit()
    connection.close()


@pytest.mark.parametrize("node_column", [True, False])
def test_exports_with_and_without_node_columns_and_without_leaking(tmp_path, node_column):
    path = tmp_path / "run.sqlite"
    make_export(path, node_column)
    diagnosis = diagnose([path])
    summary = diagnosis.sources[0]["summary"]
    assert (summary["kernels_in_graphs"], summary["kernels_eager"]) == (50, 1)
    assert diagnosis.replay.state == "all_replayed"
    text = json.dumps(diagnosis.as_dict())
    assert SECRETS[0] not in text and "access tokens" in text


def kineto_event(cat, name, ts, dur, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1, "args": args}


def test_a_capture_trace_gives_no_verdict(tmp_path):
    events = [kineto_event("cuda_runtime", "cudaStreamBeginCapture", 0, 1, correlation=1)]
    events += [kineto_event("cuda_runtime", "cudaLaunchKernel", k, 1, correlation=k) for k in range(2, 500)]
    events += [kineto_event("kernel", "k", 9999, 1, correlation=2)]
    diagnosis = diagnose([write(tmp_path, json.dumps({"traceEvents": events}), "t.json")])
    assert diagnosis.replay.state == "unknown" and "capture_launches_not_executions" in ids(diagnosis)


def test_unmatched_kernels_are_their_own_class(tmp_path):
    events = [kineto_event("cuda_runtime", "cudaGraphLaunch", 0, 1, correlation=5)]
    events += [kineto_event("kernel", "k", k, 1, correlation=5) for k in range(1, 100)]
    events += [kineto_event("kernel", "early", -5, 1, correlation=3)]
    summary = diagnose([write(tmp_path, json.dumps(events), "t.json")]).sources[0]["summary"]
    assert (summary["kernels_in_graphs"], summary["kernels_eager"], summary["kernels_unmatched"]) == (
        99,
        0,
        1,
    )


def test_stages_tell_an_eager_drafter(tmp_path):
    events = [
        kineto_event("user_annotation", "stage:draft", 0, 100),
        kineto_event("user_annotation", "stage:verify", 200, 100),
    ]
    for k in range(30):
        events.append(kineto_event("cuda_runtime", "cudaLaunchKernel", k, 1, correlation=k))
        events.append(kineto_event("kernel", "k", 10 + k, 1, correlation=k))
    events.append(kineto_event("cuda_runtime", "cudaGraphLaunch", 210, 1, correlation=99))
    events += [kineto_event("kernel", "k", 220 + k, 1, correlation=99) for k in range(60)]
    assert (
        causes(diagnose([write(tmp_path, json.dumps(events), "t.json")]))["drafter_not_captured"] == "likely"
    )


def test_no_secret_of_the_input_is_echoed(tmp_path):
    noise = (
        f"server_args=ServerArgs(model_path='{SECRETS[4]}', api_key='{SECRETS[2]}', "
        "max_running_requests=64)\n"
        f"export HF_TOKEN={SECRETS[0]} OPENAI_API_KEY={SECRETS[1]}\n"
        f'[2026-01-01 00:00:00] INFO: {SECRETS[3]}:5 - "POST /v1?api_key={SECRETS[2]} HTTP/1.1" 200 OK\n'
    )
    for path in INPUTS:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if path.suffix == ".sqlite" or len(raw) > 100_000:
            continue
        copy = write(tmp_path, noise.encode() + raw + b"\n" + noise.encode(), path.name.removesuffix(".gz"))
        text = json.dumps(diagnose([copy]).as_dict())
        assert not [secret for secret in SECRETS if secret in text], path.name


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_readers_never_crash_on_damaged_samples(tmp_path, data):
    path = data.draw(st.sampled_from([p for p in INPUTS if p.stat().st_size < 50_000]))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 6))):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place : place + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=20))
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    damaged = write(tmp_path, bytes(raw), "damaged" + path.suffix)
    document = json.dumps(diagnose([damaged]).as_dict(), allow_nan=False)
    assert json.loads(document)["schema_version"] == 1


GRAMMAR = [
    "Decode batch", ", ", "#running-req: ", "cuda graph: ", "False", "9" * 400, "1e999", "nan", "iter = ",
    "\n", "[", "\x1b[", "|", "SpecDecoding metrics: ", "Accepted: 0 tokens, Drafted: 0 tokens", " NONE ",
    "# gpu sm mem", "0 - -", "Avg prompt throughput: . tokens/s", "Time (%)", "- range count: 3",
    "** CUDA API Summary (cuda_api_sum):", "  0.0  1  1  cudaLaunchKernel", "## decode", "TRT-LLM",
    '{"traceEvents": [', "num_scheduled_requests: ", "states = {", "bs=[1, 2, 99999999999]", "\r", "\x00",
    "Speculative metrics: ",
]  # fmt: skip
EVENT_KEYS = ["ph", "cat", "name", "ts", "dur", "args", "correlation", "pid"]
NAMES = ["cudaGraphLaunch", "cudaLaunchKernel", "decode_step#1", "tape_launch", "stage:draft"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(EVENT_KEYS), inner, max_size=6)
    ),
    max_leaves=20,
)
EVENT = st.fixed_dictionaries(
    {
        "ph": st.just("X"),
        "cat": st.sampled_from(["kernel", "cuda_runtime", "cpu_op", "user_annotation"]),
        "name": st.sampled_from(NAMES),
        "ts": JSON,
        "dur": JSON,
        "args": JSON,
    }
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(st.one_of(st.text(max_size=30), st.sampled_from(GRAMMAR)), max_size=40))
def test_readers_never_crash_on_shuffled_grammar(tmp_path, pieces):
    path = write(tmp_path, "".join(pieces).encode("utf-8", "replace"))
    json.dumps(diagnose([path]).as_dict(), allow_nan=False)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(st.one_of(JSON, EVENT), max_size=8))
def test_trace_reader_never_crashes_on_odd_events(tmp_path, events):
    path = write(tmp_path, json.dumps({"traceEvents": events}), "t.json")
    json.dumps(diagnose([path]).as_dict(), allow_nan=False)
    for record in traces.steps(traces.parse({"traceEvents": events})):
        assert 0 <= record.busy_share <= 1


def test_a_long_single_line_and_a_big_log_are_read_in_time(tmp_path):
    long_line = "Decode batch, " + "a b " * 50_000 + ", " * 50_000 + '"' * 30_001
    big = "\n".join([decode_line(random.randrange(1, 99), True, second=k % 3600) for k in range(20_000)])
    assert diagnose([write(tmp_path, long_line + "\n" + big)]).replay.replayed == 20_000


def test_utf16_logs_and_carriage_returns(tmp_path):
    text = "\r\n".join(decode_line(3, True, second=k) for k in range(4))
    assert diagnose([write(tmp_path, text.encode("utf-16"))]).replay.replayed == 4


def test_a_first_line_of_each_rank_after_idle_is_left_out_of_the_mean(tmp_path):
    lines = []
    for second in (0, 40, 80):
        for rank in range(2):
            prefix = f"[2026-03-01 10:{second // 60:02d}:{second % 60:02d} DP{rank} TP{rank}] "
            speed = "3.22" if second == 0 else "500.00"
            lines.append(decode_line(5, True, prefix=prefix).replace("500.00", speed))
    diagnosis = diagnose([write(tmp_path, "\n".join(lines))])
    assert diagnosis.mean_tok_s == pytest.approx(500.0) and diagnosis.excluded_lines == 2


def test_a_recording_without_capture_calls_gives_no_verdict(tmp_path):
    events = [kineto_event("cuda_runtime", "hipLaunchKernel", k, 1, correlation=k) for k in range(546)]
    events += [kineto_event("kernel", "k", 999, 1, correlation=k) for k in (3, 4)]
    diagnosis = diagnose([write(tmp_path, json.dumps({"traceEvents": events}), "t.json")])
    assert diagnosis.replay.state == "unknown" and "capture_launches_not_executions" in ids(diagnosis)


def test_a_prefill_step_gives_no_verdict_on_decode(tmp_path):
    name = "execute_8192_context_1(sq8192sk8192)_generation_0(sq0sk0)"
    events = [kineto_event("user_annotation", name, 0, 9000)]
    for k in range(40):
        events.append(kineto_event("cuda_runtime", "cudaLaunchKernel", k, 1, correlation=k))
        events.append(kineto_event("kernel", "k", 10 + k, 1, correlation=k))
    assert diagnose([write(tmp_path, json.dumps(events), "t.json")]).replay.state == "unknown"


@pytest.mark.parametrize(
    "role, state, found", [("prefill", "not_applicable", False), ("null", "unknown", True)]
)
def test_server_settings_state_a_disabled_graph_only_for_decode(tmp_path, role, state, found):
    info = {
        "disable_cuda_graph": True,
        "disaggregation_mode": role,
        "api_key": SECRETS[2],
        "cuda_graph_bs": [1, 2],
    }
    diagnosis = diagnose([write(tmp_path, json.dumps(info), "info.json")])
    assert diagnosis.replay.state == state and ("graph_disabled" in ids(diagnosis)) is found
    assert SECRETS[2] not in json.dumps(diagnosis.as_dict())


def test_csv_of_a_query_with_its_heading(tmp_path):
    text = "index, utilization.gpu [%], memory.used [MiB]\n0, 97 %, 1038 MiB\n1, 3 %, 12 MiB\n"
    summary = diagnose([write(tmp_path, text)]).sources[0]["summary"]
    assert (summary["gpus"], summary["samples"], summary["sm_util_mean"]) == (2, 2, 50.0)
    assert diagnose([write(tmp_path, "0, 97, 1038\n")]).sources[0]["kind"] == "unrecognised"


def test_a_table_flattened_into_one_line_is_refused(tmp_path):
    flat = "# gpu pwr gtemp mtemp sm mem # Idx W C C % % 0 191 52 - 97 0 0 286 54 - 98 0"
    assert diagnose([write(tmp_path, flat)]).sources[0]["kind"] == "unrecognised"


def test_jax_lists_over_ranks_count_as_their_sum(tmp_path):
    line = (
        "[2026-01-01 00:00:00] Decode batch. #running-req per DP: [2, 2, 3, 2], #token: 9, cpu graph: True, "
    )
    text = "\n".join([line + "gen throughput (token/s): 9.00, #queue-req: 0"] * 2)
    assert diagnose([write(tmp_path, text)]).sources[0]["summary"]["running_req_max_replayed"] == 9


def test_two_engines_in_one_file_are_kept_apart(tmp_path):
    text = decode_line(3, True) + "\n" + vllm_table([(1, 1, "NONE", 9)])
    diagnosis = diagnose([write(tmp_path, text)])
    assert [s["kind"] for s in diagnosis.sources] == ["sglang_log", "vllm_log"]
    assert "two_engines_in_one_file" in ids(diagnosis)


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file"):
        diagnose([tmp_path / "absent.log"])
    with pytest.raises(ValueError, match="nothing to diagnose"):
        diagnose([])
    write(tmp_path, decode_line(1, True), "a.log")
    write(tmp_path, b"\x7fELF" + bytes(range(256)) * 20, "b.bin")
    diagnosis = diagnose(tmp_path)
    assert [s["kind"] for s in diagnosis.sources] == ["sglang_log", "unrecognised"]
    assert read_file(write(tmp_path, b"", "empty"))[0].kind == "unrecognised"


OF_SETUP = {
    sglang: "CAPTURE OLD_CAPTURE BAR CAPTURE_END CAPTURE_FAILED DISABLED SETTINGS DP_ATTENTION COUNTER EVENT",
    vllm: "ROW STATS MODE SIZES CONFIG SPEC SPEC_V0 DOWNGRADE CAPTURING CAPTURED SKIPPED EAGER_SET FAILED "
    "STARTUP ITERATION TABLE_HEAD",
}
PATTERNS = [
    (module, getattr(module, name, None) or getattr(sglang_events, name))
    for module, names in OF_SETUP.items()
    for name in names.split()
]


def own_lines():
    for path in INPUTS:
        if path.suffix in (".log", ".txt"):
            yield from path.read_text(errors="replace").splitlines()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_line_that_a_pattern_matches_is_never_skipped(data):
    line = data.draw(
        st.one_of(
            st.sampled_from(sorted(set(own_lines()))),
            st.sampled_from(PATTERNS).flatmap(
                lambda pair: st.from_regex(pair[1], alphabet=st.characters(max_codepoint=126))
            ),
        )
    )
    for module, pattern in PATTERNS:
        if pattern.search(line):
            assert module.may_matter(line.lower()), (pattern.pattern, line)


@pytest.mark.parametrize(
    "path", [p for p in INPUTS if p.suffix in (".log", ".txt", ".sqlite", ".gz")], ids=lambda p: p.name
)
def test_reading_in_pieces_says_the_same(path, monkeypatch, tmp_path):
    whole = diagnose([path]).as_dict()
    monkeypatch.setattr(large_text, "STREAM_ABOVE", 0)
    monkeypatch.setattr(large_text, "STREAM_PACKED_ABOVE", 0)
    monkeypatch.setattr(large_text, "PIECE", 777)
    assert diagnose([path]).as_dict() == whole
    if path.suffix == ".log":
        packed = write(tmp_path, gzip.compress(path.read_bytes()), path.name + ".gz")
        assert diagnose([packed]).as_dict()["replay"] == whole["replay"]


def test_a_large_log_is_reported_and_its_noise_is_not_kept(tmp_path):
    noise = '[2026-01-01 00:00:00] INFO:     192.0.2.7:5 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
    lines = "".join((noise * 99 + decode_line(3, k % 5 != 0, second=k) + "\n") for k in range(1200))
    path, seen = write(tmp_path, lines), []
    assert path.stat().st_size > large_text.STREAM_ABOVE
    kept, warnings = large_text.read_engine_lines(path, lambda *state: seen.append(state))
    assert len(kept) < 1300 and not warnings and seen[-1][1:] == (path.stat().st_size,) * 2
    replay = diagnose([path]).replay
    assert (replay.replayed, replay.eager) == (960, 240)


def test_a_large_archive_that_is_cut_gives_its_first_part(tmp_path, monkeypatch):
    lines = "\n".join(decode_line(k % 7, True, second=k, accept=1 + k % 3) for k in range(3000))
    monkeypatch.setattr(large_text, "STREAM_PACKED_ABOVE", 0)
    path = write(tmp_path, gzip.compress(lines.encode())[:-3000], "server.log.gz")
    diagnosis = diagnose([path])
    assert 0 < diagnosis.replay.replayed < 3000
    assert any("archive is cut" in text for text in diagnosis.warnings)
