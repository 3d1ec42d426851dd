import pytest

from workbench import targets


def test_every_target_file_loads_and_states_its_source():
    for name in targets.names():
        target = targets.load(name)
        assert target.source and target.dram_gbps > 0 and target.tensor_tflops > 0
        assert target.dram_gbps <= target.dram_peak_gbps
        assert (target.backend == "cuda") == bool(target.arch) == (target.graph_backend == "cuda")


def test_unknown_target_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown target 'h2000': choose one of .*h200"):
        targets.load("h2000")


def test_compute_capability_of_suffixed_arch():
    assert targets.load("h200").compute_capability == (9, 0)
    assert targets.load("rtx-pro-6000").compute_capability == (12, 0)
    assert targets.load("cpu").compute_capability == (0, 0)


def test_absent_hardware_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(targets, "detect", lambda: targets.load("cpu"))
    targets.require_hardware(targets.load("cpu"))
    with pytest.raises(ValueError, match=r"'b200' needs a NVIDIA B200; this machine is 'cpu'"):
        targets.require_hardware(targets.load("b200"))


def test_incomplete_target_file_names_the_missing_field(tmp_path, monkeypatch):
    (tmp_path / "odd.toml").write_text('title = "Odd"\n')
    monkeypatch.setattr(targets, "TARGETS_DIR", tmp_path)
    with pytest.raises(ValueError, match=r"odd\.toml: missing .*'arch'"):
        targets.load("odd")
