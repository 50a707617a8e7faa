"""Prices of orders, in cents."""

FREE_SHIPPING_FROM = 5000
SHIPPING = 490


def discounted(cents, percent):
    """`cents` less `percent`; half a cent is rounded up."""
    return (cents * (100 - percent) + 50) // 100


def with_shipping(cents):
    """`cents` plus shipping, which is free from FREE_SHIPPING_FROM on."""
    return cents if cents >= FREE_SHIPPING_FROM else cents + SHIPPING


def instalments(cents, number):
    """`cents` in `number` parts that add up to it."""
    return [cents // number] * number
