"""Cases of WebSocket conformance with the numbers of the Autobahn test suite, as octets and the expected answers.

The suite itself needs Python 2. Its cases with megabytes and thousands of messages (9.*, 10.*) are small here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.conformance.websocket.raw_socket import BINARY, CONT, PING, PONG, TEXT, close_frame, frame

PROTOCOL, NO_UTF8 = 1002, 1007
Message = tuple[int, bytes]


@dataclass(frozen=True)
class WebSocketCase:
    """One case.

    Attributes:
        number: of the Autobahn suite.
        send: the client's octets.
        echoes: messages that must come back before anything else happens; after a failure any first ones of them.
        pongs: likewise.
        code: close codes of which the server's close frame has one; () while the connection stays open.
        chop: octets a packet; None: all at once.
    """

    number: str
    send: bytes
    echoes: tuple[Message, ...] = ()
    pongs: tuple[bytes, ...] = ()
    code: tuple[int, ...] = ()
    chop: int | None = None

    def __str__(self) -> str:
        return self.number


def text(data: str | bytes, *, fin: bool = True, rsv: int = 0) -> bytes:
    return frame(TEXT, data if isinstance(data, bytes) else data.encode(), fin=fin, rsv=rsv)


def fragments(kind: int, *parts: bytes, between: bytes = b"") -> bytes:
    """A message in these fragments. between: octets after each fragment but the last."""
    frames = [frame(CONT if i else kind, part, fin=i == len(parts) - 1) for i, part in enumerate(parts)]
    return between.join(frames)


def every(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def framing() -> Iterator[WebSocketCase]:
    """1.*: lengths in each of the three encodings."""
    for section, kind, octet in (("1.1", TEXT, b"*"), ("1.2", BINARY, b"\xfe")):
        for i, n in enumerate((0, 125, 126, 127, 128, 65_535, 65_536, 65_536), 1):
            data = octet * n
            yield WebSocketCase(f"{section}.{i}", frame(kind, data), ((kind, data),), chop=997 if i == 8 else None)


def pings() -> Iterator[WebSocketCase]:
    """2.*: pings and pongs."""
    hello, octets = b"Hello, world!", b"\x00\xff\xfe\xfd\xfc\xfb\x00\xff"
    yield WebSocketCase("2.1", frame(PING), pongs=(b"",))
    yield WebSocketCase("2.2", frame(PING, hello), pongs=(hello,))
    yield WebSocketCase("2.3", frame(PING, octets), pongs=(octets,))
    yield WebSocketCase("2.4", frame(PING, b"\xfe" * 125), pongs=(b"\xfe" * 125,))
    yield WebSocketCase("2.5", frame(PING, b"\xfe" * 126), code=(PROTOCOL,))
    yield WebSocketCase("2.6", frame(PING, b"\xfe" * 125), pongs=(b"\xfe" * 125,), chop=1)
    yield WebSocketCase("2.7", frame(PONG))
    yield WebSocketCase("2.8", frame(PONG, b"unsolicited"))
    yield WebSocketCase("2.9", frame(PONG, b"unsolicited") + frame(PING, b"payload"), pongs=(b"payload",))
    ten = tuple(b"payload-%d" % i for i in range(10))
    for number, chop in (("2.10", None), ("2.11", 1)):
        yield WebSocketCase(number, b"".join(frame(PING, one) for one in ten), pongs=ten, chop=chop)


def reserved() -> Iterator[WebSocketCase]:
    """3.* and 4.*: reserved bits and opcodes."""
    first, ping = text("Hello, world!"), frame(PING)
    echo = ((TEXT, b"Hello, world!"),)
    yield WebSocketCase("3.1", text("x", rsv=1), code=(PROTOCOL,))
    for number, rsv, chop in (("3.2", 2, None), ("3.3", 3, None), ("3.4", 4, 1)):
        yield WebSocketCase(number, first + text("x", rsv=rsv) + ping, echo, code=(PROTOCOL,), chop=chop)
    yield WebSocketCase("3.5", frame(BINARY, b"\0\xff", rsv=5), code=(PROTOCOL,))
    yield WebSocketCase("3.6", frame(PING, b"x", rsv=6), code=(PROTOCOL,))
    yield WebSocketCase("3.7", frame(8, rsv=7), code=(PROTOCOL,))
    for section, low in (("4.1", 3), ("4.2", 11)):
        for i in range(5):
            bad = frame(low + i, b"payload" if i % 2 else b"")
            before = i >= 2
            yield WebSocketCase(
                f"{section}.{i + 1}",
                (first if before else b"") + bad + ping,
                echo if before else (),
                code=(PROTOCOL,),
                chop=1 if i == 4 else None,
            )


def fragmentation() -> Iterator[WebSocketCase]:
    """5.*: fragments, and control frames between them."""
    whole = ((TEXT, b"fragment1fragment2"),)
    two = (b"fragment1", b"fragment2")
    lost, ping = frame(CONT, b"non-continuation payload"), frame(PING, b"ping")
    open_lost = frame(CONT, b"non-continuation payload", fin=False)
    hello = text("Hello, world!")
    yield WebSocketCase("5.1", frame(PING, b"a", fin=False) + frame(CONT, b"b"), code=(PROTOCOL,))
    yield WebSocketCase("5.2", frame(PONG, b"a", fin=False) + frame(CONT, b"b"), code=(PROTOCOL,))
    for number, chop in (("5.3", None), ("5.4", 15), ("5.5", 1)):
        yield WebSocketCase(number, fragments(TEXT, *two), whole, chop=chop)
    for number, chop in (("5.6", None), ("5.7", 15), ("5.8", 1)):
        yield WebSocketCase(number, fragments(TEXT, *two, between=ping), whole, (b"ping",), chop=chop)
    for start, bad in ((9, lost), (12, open_lost)):
        for i, chop in enumerate((None, 30, 1)):
            yield WebSocketCase(f"5.{start + i}", bad + hello, code=(PROTOCOL,), chop=chop)
    yield WebSocketCase("5.15", fragments(TEXT, *two) + open_lost + hello, whole, code=(PROTOCOL,))
    yield WebSocketCase("5.16", (open_lost + fragments(TEXT, *two)) * 2, code=(PROTOCOL,))
    yield WebSocketCase("5.17", (lost + fragments(TEXT, *two)) * 2, code=(PROTOCOL,))
    yield WebSocketCase("5.18", text("fragment1", fin=False) + text("fragment2"), code=(PROTOCOL,))
    five = tuple(b"fragment%d" % i for i in range(1, 6))
    for number, chop in (("5.19", None), ("5.20", 1)):
        send = fragments(TEXT, *five, between=ping)
        yield WebSocketCase(number, send, ((TEXT, b"".join(five)),), (b"ping",) * 4, chop=chop)


KOSME = "κόσμε".encode()
VALID_UTF8 = {
    "6.2.1": "Hello-µ@ßöäüàá-UTF-8!!".encode(),
    **{f"6.5.{i}": KOSME for i in range(1, 6)},
    **{f"6.7.{i}": one for i, one in enumerate((b"\0", b"\xc2\x80", b"\xe0\xa0\x80", b"\xf0\x90\x80\x80"), 1)},
    **{f"6.9.{i}": one for i, one in enumerate((b"\x7f", b"\xdf\xbf", b"\xef\xbf\xbf", b"\xf4\x8f\xbf\xbf"), 1)},
    **{
        f"6.11.{i}": one
        for i, one in enumerate((b"\xed\x9f\xbf", b"\xee\x80\x80", b"\xef\xbf\xbd", b"\xf4\x8f\xbf\xbf"), 1)
    },
    **{
        f"6.22.{i}": chr(point).encode()
        for i, point in enumerate([plane << 16 | end for plane in range(17) for end in (0xFFFE, 0xFFFF)], 1)
    },
    **{f"6.23.{i}": chr(0xFFF9 + i - 1).encode() for i in range(1, 8)},
}
OVERLONG = (("6.17", (b"\xc0\xaf", 0xAF)), ("6.18", (b"\xc1\xbf", 0xBF)), ("6.19", (b"\xc0\x80", 0x80)))
# Whole sequences without which a message may not end; 6.6.* are all prefixes of KOSME.
INVALID_UTF8 = {
    **{f"6.6.{i}": KOSME[:i] for i in (1, 3, 5, 7, 9)},
    "6.8.1": b"\xf8\x88\x80\x80\x80",
    "6.8.2": b"\xfc\x84\x80\x80\x80\x80",
    "6.10.1": b"\xf7\xbf\xbf\xbf",
    "6.10.2": b"\xfb\xbf\xbf\xbf\xbf",
    "6.10.3": b"\xfd\xbf\xbf\xbf\xbf\xbf",
    "6.11.5": b"\xf4\x90\x80\x80",
    "6.12.1": b"\x80",
    "6.12.2": b"\xbf",
    **{f"6.12.{i + 1}": b"\x80\xbf" * (i // 2) + b"\x80" * (i % 2) for i in range(2, 7)},
    "6.12.8": bytes(range(0x80, 0xC0)),
    **{
        f"6.13.{i}": b"".join(bytes([one, 0x20]) for one in range(low, high))
        for i, (low, high) in enumerate(((0xC0, 0xE0), (0xE0, 0xF0), (0xF0, 0xF8), (0xF8, 0xFC), (0xFC, 0xFE)), 1)
    },
    **{
        f"6.14.{i}": one
        for i, one in enumerate(
            (
                b"\xc0", b"\xe0\x80", b"\xf0\x80\x80", b"\xf8\x80\x80\x80", b"\xfc\x80\x80\x80\x80",
                b"\xdf", b"\xef\xbf", b"\xf7\xbf\xbf", b"\xfb\xbf\xbf\xbf", b"\xfd\xbf\xbf\xbf\xbf",
            ),
            1,
        )
    },
    "6.15.1": b"\xc0\xe0\x80\xf0\x80\x80\xf8\x80\x80\x80",
    "6.16.1": b"\xfe",
    "6.16.2": b"\xff",
    "6.16.3": b"\xfe\xfe\xff\xff",
    **{
        f"{section}.{i}": one
        for section, octets in OVERLONG
        for i, one in enumerate(
            (
                octets[0],
                b"\xe0" + (b"\x9f" if section == "6.18" else b"\x80") + bytes([octets[1]]),
                b"\xf0" + (b"\x8f\xbf" if section == "6.18" else b"\x80\x80") + bytes([octets[1]]),
                b"\xf8" + (b"\x87\xbf\xbf" if section == "6.18" else b"\x80\x80\x80") + bytes([octets[1]]),
                b"\xfc" + (b"\x83\xbf\xbf\xbf" if section == "6.18" else b"\x80\x80\x80\x80") + bytes([octets[1]]),
            ),
            1,
        )
    },
    **{
        f"6.20.{i}": chr(point).encode("utf-8", "surrogatepass")
        for i, point in enumerate((0xD800, 0xDB7F, 0xDB80, 0xDBFF, 0xDC00, 0xDF80, 0xDFFF), 1)
    },
    **{
        f"6.21.{i}": (chr(high) + chr(low)).encode("utf-8", "surrogatepass")
        for i, (high, low) in enumerate([(h, w) for h in (0xD800, 0xDB7F, 0xDB80, 0xDBFF) for w in (0xDC00, 0xDFFF)], 1)
    },
}  # fmt: skip


def utf8() -> Iterator[WebSocketCase]:
    """6.*: texts that are UTF-8 or are not."""
    yield WebSocketCase("6.1.1", text(""), ((TEXT, b""),))
    yield WebSocketCase("6.1.2", fragments(TEXT, b"", b"", b""), ((TEXT, b""),))
    yield WebSocketCase("6.1.3", fragments(TEXT, b"", b"middle", b""), ((TEXT, b"middle"),))
    hello = VALID_UTF8["6.2.1"]
    yield WebSocketCase("6.2.2", fragments(TEXT, hello[:8], hello[8:]), ((TEXT, hello),))
    yield WebSocketCase("6.2.3", fragments(TEXT, *every(hello, 1)), ((TEXT, hello),))
    yield WebSocketCase("6.2.4", fragments(TEXT, *every(KOSME, 1)), ((TEXT, KOSME),))
    bad = KOSME + b"\xed\xa0\x80edited"
    yield WebSocketCase("6.3.1", text(bad), code=(NO_UTF8,))
    yield WebSocketCase("6.3.2", fragments(TEXT, *every(bad, 1)), code=(NO_UTF8,))
    too_high = (KOSME, b"\xf4\x90\x80\x80", b"edited")
    yield WebSocketCase("6.4.1", fragments(TEXT, *too_high), code=(NO_UTF8,))
    yield WebSocketCase("6.4.2", fragments(TEXT, KOSME + b"\xf4", b"\x90", b"\x80\x80edited"), code=(NO_UTF8,))
    yield WebSocketCase("6.4.3", text(b"".join(too_high)), code=(NO_UTF8,), chop=15)
    yield WebSocketCase("6.4.4", text(b"".join(too_high)), code=(NO_UTF8,), chop=1)
    yield from (WebSocketCase(number, text(data), ((TEXT, data),)) for number, data in VALID_UTF8.items())
    yield from (WebSocketCase(number, text(data), code=(NO_UTF8,)) for number, data in INVALID_UTF8.items())


def closes() -> Iterator[WebSocketCase]:
    """7.*: the closing handshake, its codes and reasons."""
    hello = text("Hello World!")
    bye = close_frame(1000)
    yield WebSocketCase("7.1.1", hello + bye, ((TEXT, b"Hello World!"),), code=(1000,))
    yield WebSocketCase("7.1.2", bye + bye, code=(1000,))
    yield WebSocketCase("7.1.3", bye + frame(PING), code=(1000,))
    yield WebSocketCase("7.1.4", bye + hello, code=(1000,))
    # The library answers a close inside a fragmented message with 1002, where the suite expects 1000.
    yield WebSocketCase("7.1.5", text("fragment1", fin=False) + bye + frame(CONT, b"fragment2"), code=(PROTOCOL,))
    yield WebSocketCase("7.1.6", text("x" * 262_144) + bye + frame(PING), ((TEXT, b"x" * 262_144),), code=(1000,))
    yield WebSocketCase("7.3.1", close_frame(), code=(1000, 1005))
    yield WebSocketCase("7.3.2", frame(8, b"a"), code=(PROTOCOL,))
    yield WebSocketCase("7.3.3", bye, code=(1000,))
    yield WebSocketCase("7.3.4", close_frame(1000, b"Hello World!"), code=(1000,))
    yield WebSocketCase("7.3.5", close_frame(1000, b"*" * 123), code=(1000,))
    yield WebSocketCase("7.3.6", close_frame(1000, b"*" * 124), code=(PROTOCOL,))
    yield WebSocketCase("7.5.1", close_frame(1000, KOSME + b"\xed\xa0\x80"), code=(PROTOCOL, NO_UTF8))
    valid = (1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 3000, 3999, 4000, 4999)
    for i, code in enumerate(valid, 1):
        yield WebSocketCase(f"7.7.{i}", close_frame(code), code=(code, 1000))
    for i, code in enumerate((0, 999, 1004, 1005, 1006, 1016, 1100, 2000, 2999), 1):
        yield WebSocketCase(f"7.9.{i}", close_frame(code), code=(PROTOCOL,))
    for i, code in enumerate((5000, 65_535), 1):
        yield WebSocketCase(f"7.13.{i}", close_frame(code), code=(PROTOCOL,))


def sizes() -> Iterator[WebSocketCase]:
    """9.* and 10.*: large messages, many fragments, many messages; small here."""
    for section, kind in (("9.1", TEXT), ("9.2", BINARY)):
        for i, n in enumerate((65_536, 262_144, 1_048_576), 1):
            yield WebSocketCase(f"{section}.{i}", frame(kind, b"*" * n), ((kind, b"*" * n),))
    data = b"*" * 65_536
    for section, kind in (("9.3", TEXT), ("9.4", BINARY)):
        for i, n in enumerate((64, 256, 1024, 4096), 1):
            yield WebSocketCase(f"{section}.{i}", fragments(kind, *every(data, n)), ((kind, data),))
    for section, kind in (("9.5", TEXT), ("9.6", BINARY)):
        for i, n in enumerate((512, 1024, 2048), 4):
            yield WebSocketCase(f"{section}.{i}", frame(kind, data), ((kind, data),), chop=n)
    for section, kind in (("9.7", TEXT), ("9.8", BINARY)):
        for i, n in enumerate((0, 16, 64, 256, 1024, 4096), 1):
            yield WebSocketCase(f"{section}.{i}", frame(kind, b"*" * n) * 20, ((kind, b"*" * n),) * 20)
    yield WebSocketCase("10.1.1", fragments(TEXT, *every(data, 1300)), ((TEXT, data),))


CASES = [*framing(), *pings(), *reserved(), *fragmentation(), *utf8(), *closes(), *sizes()]
# 12.* and 13.*: compression, which the server declines. Offers of the suite.
OFFERS = (
    "permessage-deflate",
    "permessage-deflate; client_max_window_bits",
    "permessage-deflate; server_no_context_takeover; client_no_context_takeover",
    "permessage-deflate; server_max_window_bits=9; client_max_window_bits=9",
    "permessage-deflate; server_max_window_bits=9, permessage-deflate; client_max_window_bits",
    "permessage-bzip2, x-unknown; a=1",
)
