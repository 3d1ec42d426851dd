"""Every cause a diagnosis can name, with the experiment that would decide it."""

from workbench.diagnose.reading import Cause, Likelihood

NEXT_EXPERIMENTS = {
    "batch_above_captured": "raise the largest captured batch above the requests that run, "
    "or lower the request limit; the flag must turn True",
    "dp_attention_token_sum": "run once with dp=1; if the flag turns True, "
    "raise the largest captured batch by the DP size",
    "speculation_off_without_graph": "lower the batch below the threshold that switches speculation off, "
    "or capture plain decode too",
    "verify_width_mismatch": "pad every draft tree to one fixed width equal to the captured one; "
    "the flag must turn True",
    "mode_not_allowed": "run the same load without DP attention or MLP gather; "
    "a ceiling of floor(max_bs / width) confirms it",
    "hidden_mode_mismatch": "switch the return of hidden states off and look whether the flag turns True",
    "graph_disabled": "start without the option that disables graphs",
    "capture_failed": "read the error at capture, start with a smaller capture list",
    "backend_downgrade": "start with an attention backend that supports full graphs, or without the drafter",
    "capture_sizes_not_multiple": "set the capture sizes to multiples of 1 + draft tokens",
    "padding_gap": "capture the sizes that occur and compare the step time",
    "drafter_not_captured": "trace 20 steps and count launches inside the draft span",
    "flag_not_propagated": "trust the trace or the counter of graph passes; make the worker hand its flag on",
    "mixed_prefill_batch": "tag steps by what they hold; steps without prefill must be replayed",
    "ranks_disagree": "equalise the load of the ranks and log the flag per rank",
}


def cause(id: str, likelihood: Likelihood, why: str) -> Cause:
    """A cause with the experiment that decides it."""
    return Cause(id, likelihood, why, NEXT_EXPERIMENTS[id])
