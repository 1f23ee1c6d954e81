"""Random schemas: every output that ends by itself parses and validates. A bench has 10,000 of them."""

from __future__ import annotations

from random_outputs import check_outputs


def test_outputs_that_end_by_themselves_are_valid() -> None:
    ended, others = check_outputs(range(240))
    assert ended >= 200
    assert others <= 40
