import pytest

from workbench.shapes import VerifyShape
from workbench.targets import load


def test_bytes_and_flops_counted_by_hand():
    shape = VerifyShape(bs=2, heads=3, max_q_len=5, max_kv_len=7)
    assert shape.kv_bytes == 2 * 7 * 576 * 2
    assert shape.flops == 2 * 2 * (3 * 5) * 7 * (576 + 512)
    assert shape.out_bytes == 2 * 15 * (512 * 2 + 4)


@pytest.mark.parametrize(
    ("heads", "q_len", "kv_len", "floor_us"),
    [
        (8, 1, 46080, 12.3),
        (8, 16, 46080, 16.2),
        (8, 64, 46080, 65.1),
        (64, 16, 46080, 130.0),
        (8, 64, 200000, 282.1),
    ],
)
def test_floor_agrees_with_the_published_table(heads, q_len, kv_len, floor_us):
    # The table leaves out q, output and index traffic, which adds at most a few percent here.
    assert VerifyShape(1, heads, q_len, kv_len).floor_us(load("h200")) == pytest.approx(floor_us, rel=0.02)


def test_memory_to_compute_crossover_is_at_97_rows_on_h200():
    h200 = load("h200")
    assert VerifyShape(1, 8, 8, 65536).bound(h200) == "memory"
    assert VerifyShape(1, 8, 16, 65536).bound(h200) == "compute"


@pytest.mark.parametrize("field", [{"dtype": "int4"}, {"bs": 0}, {"max_kv_len": -1}])
def test_impossible_shape_names_the_value(field):
    with pytest.raises(ValueError, match=str(next(iter(field.values())))):
        VerifyShape(**({"bs": 1, "heads": 8, "max_q_len": 1, "max_kv_len": 64} | field))
