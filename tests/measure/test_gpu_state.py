import threading

import pytest
import torch

from workbench.measure import gpu_state
from workbench.measure.gpu_state import GpuSampler, Reading, throttle_text


def test_throttle_reasons_are_named():
    assert throttle_text(0) == throttle_text(1) == "none"
    assert throttle_text(0x4 | 0x40) == "sw_power_cap+hw_thermal"
    assert throttle_text(0x4 | 0x8000) == "sw_power_cap+0x8000"


def test_state_holds_the_extremes_of_all_readings():
    sampler = GpuSampler()
    sampler.readings += [Reading(1980.0, 40.0, 1), Reading(1500.0, 61.0, 4), Reading(None, None, None)]
    state = sampler.state({"dram_util": 0.5, "sm_util": 0.9})
    assert (state.clock_min_mhz, state.clock_max_mhz, state.temperature_c) == (1500.0, 1980.0, 61.0)
    assert state.throttle_reasons == "sw_power_cap"
    assert (state.dram_util, state.tensor_util) == (0.5, None)


def test_without_nvml_there_is_a_reason_and_no_number():
    if gpu_state.open_device()[0] is not None:
        pytest.skip("this machine has NVML")
    before = threading.active_count()
    with GpuSampler() as sampler:
        assert threading.active_count() == before
    assert sampler.state() is None and sampler.reason
    assert gpu_state.read() is None
    assert gpu_state.neighbours() == (None, sampler.reason)
    utilisation, reason = gpu_state.read_utilisation(lambda: pytest.fail("must not run"))
    assert utilisation == {} and reason


@pytest.mark.gpu
def test_a_busy_gpu_is_seen():
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def work():
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()

    with GpuSampler() as sampler:
        utilisation, reason = gpu_state.read_utilisation(work)
    state = sampler.state(utilisation)
    assert state is not None and state.clock_max_mhz > 0
    if utilisation:
        assert 0.3 < state.tensor_util <= 1.0 and 0 <= state.dram_util <= 1.0
    else:
        assert reason
