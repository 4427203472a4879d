"""Bytes that connections hold: counted, bounded for an address and for the process."""

import pytest

from worker.protocol.held_bytes import ConnectionBytes, HeldBytes, group_of


def opened(held: HeldBytes, address: str, shed: list[str], name: str) -> ConnectionBytes:
    return held.open(address, lambda: shed.append(name))


def test_closes_the_largest_connection_of_an_address_above_its_bound() -> None:
    held, shed = HeldBytes(max_total=1000, max_address=100), []
    small, large = opened(held, "192.0.2.1", shed, "small"), opened(held, "192.0.2.1", shed, "large")
    other = opened(held, "192.0.2.2", shed, "other")
    other.add(95)
    large.add(70)
    small.add(30)
    assert not shed
    small.add(1)
    assert shed == ["large"] and held.total == 95 + 31
    large.add(500)  # data that was on the way
    assert held.total == 95 + 31 and shed == ["large"]


def test_closes_the_largest_connection_of_the_process_above_its_bound() -> None:
    held, shed = HeldBytes(max_total=100, max_address=90), []
    connections = [opened(held, f"192.0.2.{number}", shed, str(number)) for number in range(3)]
    for connection, n_bytes in zip(connections, (50, 20, 30), strict=True):
        connection.add(n_bytes)
    assert not shed
    connections[1].add(1)
    assert shed == ["0"] and held.total == 51


def test_loopback_has_only_the_bound_of_the_process() -> None:
    held, shed = HeldBytes(max_total=1000, max_address=100), []
    one = opened(held, "127.0.0.1", shed, "one")
    one.add(1000)
    assert not shed
    one.add(1)
    assert shed == ["one"] and held.total == 0


def test_closed_connections_hold_nothing() -> None:
    held, shed = HeldBytes(max_total=1000, max_address=100), []
    one = opened(held, "192.0.2.1", shed, "one")
    one.add(90)
    one.close()
    opened(held, "192.0.2.1", shed, "two").add(90)
    assert held.total == 90 and not shed


@pytest.mark.parametrize(
    ("address", "group"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("127.0.0.2", None),
        ("::1", None),
        ("::ffff:127.0.0.1", None),
        ("", None),
        (None, None),
    ],
)
def test_groups_addresses_by_client(address: str | None, group: str | None) -> None:
    assert group_of(address) == group
