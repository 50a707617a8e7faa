import pytest
from pricing import discounted, instalments, with_shipping


@pytest.mark.parametrize(("cents", "percent", "price"), [(1000, 0, 1000), (1000, 10, 900), (999, 50, 500)])
def test_discounted(cents, percent, price):
    assert discounted(cents, percent) == price


def test_shipping():
    assert with_shipping(1000) == 1490
    assert with_shipping(6000) == 6000


def test_shipping_is_free_from_fifty():
    assert with_shipping(4999) == 5489
    assert with_shipping(5000) == 5000


def test_instalments():
    assert instalments(900, 3) == [300, 300, 300]
