"""The pages' modules without sound: settings, the state of server and connection, resumption, texts."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.e2e.modules.loading import call
from worker.config.layers import setting_fields
from worker.config.service import Config

pytestmark = pytest.mark.programs

# --- state of server and connection ---------------------------------------------------------------


def test_reason_for_waiting(page: Page) -> None:
    cases = [
        ({"slots": {"total": 2, "free": 1}, "loading_workers": 1}, None),
        ({"slots": {"total": 2, "free": 0}, "loading_workers": 1}, "busy"),
        ({"slots": {"total": 0, "free": 0}, "loading_workers": 1}, "loading"),
        ({"slots": {"total": 0, "free": 0}, "loading_workers": 0}, "no_worker"),
        ({"slots": {"total": 0, "free": 0}, "loading_workers": 0, "reason": "loading"}, "loading"),
    ]
    got = call(page, "shared/server-status.js", "return given.map(lib.reasonOf)", [status for status, _ in cases])
    assert got == [reason for _, reason in cases]


def test_connection_quality_names_the_cause(page: Page) -> None:
    def results(reply: float, server: float) -> list[dict[str, float]]:
        return [{"unit": n, "reply_ms": reply, "wall_clock_ms": server} for n in range(1, 11)]

    cases = [
        ((results(400, 300), []), {"level": 3, "cause": None}),
        ((results(800, 300), []), {"level": 2, "cause": "network"}),
        ((results(1300, 300), []), {"level": 1, "cause": "network"}),
        ((results(1300, 1200), []), {"level": 1, "cause": "server"}),
        ((results(400, 300), [{"unit": 3}, {"unit": 4}]), {"level": 1, "cause": "network"}),
        (([], []), {"level": 3, "cause": None}),
    ]
    body = "return given.map(([results, gaps]) => lib.qualityOf(results, gaps))"
    got = call(page, "live/conversation/quality.js", body, [list(case) for case, _ in cases])
    assert got == [expected for _, expected in cases]


def test_delays_between_attempts_double_and_end(page: Page) -> None:
    body = """const backoff = new lib.Backoff();
        const delays = Array.from({ length: 13 }, () => backoff.next(() => 0.5));
        backoff.reset();
        return [delays, backoff.next(() => 0), backoff.next(() => 1)]"""
    delays, low, high = call(page, "live/conversation/backoff.js", body)
    assert delays == [1, 2, 4, 8, *[15] * 8, None], delays
    assert (low, high) == (0.8, 2.4), "expected 20 % of randomness"


def test_settings_with_dots_become_objects(page: Page) -> None:
    given = {"temperature": 0.5, "window.mode": "off", "window.max_units": 3}
    got = call(page, "shared/fields.js", "return lib.nested(given)", given)
    assert got == {"temperature": 0.5, "window": {"mode": "off", "max_units": 3}}


def test_every_session_setting_has_a_control(page: Page) -> None:
    """With its documented range and default, and a name in both languages. Two settings have only one value."""
    body = """const { SESSION_SETTINGS: found } = lib;
        const texts = await Promise.all(["en", "zh"].map((name) => import(`/static/live/texts/${name}.js`)));
        const names = found.map(({ key }) => `set_${key.replaceAll(".", "_")}`);
        const missing = texts.flatMap((one, i) => names.filter((name) => !(name in one[["en", "zh"][i]])));
        return { found, missing }"""
    got = call(page, "live/controls/session-settings.js", body)
    assert not got["missing"], f"expected texts, got none for {got['missing']}"
    controls = {one["key"]: one for one in got["found"]}
    settings = {one.key.removeprefix("duplex.session."): one for one in setting_fields(Config)}
    expected = {
        one.removeprefix("duplex.session.")
        for one in (setting.key for setting in setting_fields(Config))
        if one.startswith("duplex.session.")
    } - {"chunk_ms", "sample_rate", "window"}
    assert controls.keys() == expected, controls.keys() ^ expected
    for key, control in controls.items():
        default = json.loads(json.dumps(settings[key].default))
        assert control["usual"] == default or key == "window.marker", (
            f"{key}: expected {default}, got {control['usual']}"
        )


def test_page_begins_when_the_server_has_asked_for_it(page: Page) -> None:
    """`prepared` is delivered after `start_after_ms`, at once without it, and not after the end."""
    body = """const order = [];
        class Socket { static OPEN = 1; readyState = 1; send() {} close() {} constructor() { Socket.last = this; } }
        const real = window.WebSocket;
        window.WebSocket = Socket;
        const receive = (name, ms, ends) => new Promise((resolve) => {
            const on = { prepared: () => { order.push(name); resolve(); } };
            const session = new lib.Session("a", {}, on);
            Socket.last.onopen();
            Socket.last.onmessage({ data: JSON.stringify({ type: "prepared", spec: {}, start_after_ms: ms }) });
            order.push(`${name} received`);
            if (ends) { session.close(); resolve(); }
        });
        await receive("at once", 0, false);
        const ended = receive("ended", 10, true);
        await receive("later", 40, false);
        await ended;
        window.WebSocket = real;
        return order"""
    got = call(page, "live/conversation/session.js", body)
    assert got == ["at once", "at once received", "ended received", "later received", "later"], got


def test_resumption_counts_messages_and_sends_again_what_has_not_arrived(page: Page) -> None:
    body = """const one = new lib.Resumption();
        const closed = (code, reason = "") => one.survives({ code, reason });
        const got = [closed(1006)];
        for (const text of ["prepare", "a", "b"]) one.keep(text);
        for (const type of ["queued", "queue_done"]) one.count({ type });
        one.count({ type: "prepared", resume_token: "t1", resume_grace_s: 30 });
        for (let n = 0; n < 6; n++) one.count({ type: "result" });
        got.push(one.acknowledgement(), closed(1006), closed(1000), closed(4001));
        got.push(closed(1012), closed(1012, "Try again"));
        one.count(null);
        got.push(one.acknowledgement(), one.acknowledgement(), one.request());
        one.count({ type: "session_resumed" });
        got.push(one.resumed({ resume_token: "t2", received: 1, lost: 0 }));
        got.push(one.request().received, one.request().token);
        got.push(one.resumed({ resume_token: "t3", received: 3, lost: 1 }));
        one.keep("x".repeat(9 * 2 ** 20));
        got.push(one.resumed({ resume_token: "t4", received: 3, lost: 0 }));
        return got"""
    got = call(page, "live/conversation/resumption.js", body)
    request = {"type": "resume_session", "token": "t1", "received": 8}
    acknowledged = [None, True, False, False, False, True, {"type": "received", "count": 8}, None, request]
    assert got == [False, *acknowledged, ["a", "b"], 8, "t2", None, None], got


def test_a_session_whose_messages_the_server_has_dropped_is_over(page: Page) -> None:
    body = """const ends = [];
        class Socket {
            static OPEN = 1; readyState = 1; static n = 0;
            constructor() { Socket.last = this; Socket.n += 1; }
            send() {}
            close() {}
        }
        const real = window.WebSocket;
        window.WebSocket = Socket;
        const receive = (message) => Socket.last.onmessage({ data: JSON.stringify(message) });
        const begin = () => {
            const session = new lib.Session("a", {}, { closed: (event) => ends.push(event.isIncomplete) });
            Socket.last.onopen();
            receive({ type: "prepared", spec: {}, resume_token: "t", resume_grace_s: 30 });
            return session;
        };
        const resume = (session, answer) => {
            Socket.last.onclose({ code: 1006, reason: "" });
            session.retry();
            Socket.last.onopen();
            receive(answer);
        };
        begin();
        receive({ type: "messages_lost", lost: 2, lost_sound_s: 1, next: 9 });
        resume(begin(), { type: "session_resumed", resume_token: "t", received: 0, lost: 1 });
        resume(begin(), { type: "error", code: "resume_refused", error: "" });
        resume(begin(), { type: "session_resumed", resume_token: "t", received: 0, lost: 0 });
        window.WebSocket = real;
        return { ends, n: Socket.n }"""
    got = call(page, "live/conversation/session.js", body)
    assert got == {"ends": [True, True, False], "n": 7}, f"expected two incomplete ones and a refused one, got {got}"
    body = "const code = lib.closeErrorCode(given); return [code, lib.isRetried(code)]"
    lost = call(page, "live/conversation/errors.js", body, {"opened": True, "isIncomplete": True})
    assert lost == ["messages_lost", False], f"expected an end without another attempt, got {lost}"


def test_both_languages_have_the_same_texts(page: Page, root: Path) -> None:
    """Of all pages; each page's help asks the same number of questions in both."""
    for folder in ("shared", "live", "chat", "half_duplex", "home", "viewer", "admin"):
        body = "const { zh } = await import(given); return [Object.keys(lib.en), Object.keys(zh)]"
        english, chinese = call(page, f"{folder}/texts/en.js", body, f"/static/{folder}/texts/zh.js")
        assert english == chinese, f"{folder}: {set(english) ^ set(chinese)}"
    both = call(page, "shared/texts/character.js", "return Object.values(lib.characterTexts).map(Object.keys)")
    assert both[0] == both[1], set(both[0]) ^ set(both[1])
    faq = root / "server" / "static" / "faq"
    questions = {file.relative_to(faq): file.read_text().count("\n## ") for file in faq.glob("*/*.md")}
    names = sorted(file.name for file in faq.glob("en/*.md"))
    assert names and all(questions[Path("en", name)] == questions.get(Path("zh", name)) for name in names), questions


def test_each_unit_of_pieces_gets_one_picture_and_its_demand(page: Page) -> None:
    """The unit ends with the tenth piece, and early with the fourteenth: the next one begins there."""
    body = """const out = new lib.Outgoing(); const found = [];
        for (let n = 1; n <= 30; n++) {
            if (n === 16) out.speakOnce();
            const { picture, snap } = out.next(1600);
            const demands = out.demands(false);
            out.add(1600, demands);
            found.push([picture, snap, Boolean(demands.force_speak), out.rest]);
            out.answered([10, 14, 24].includes(n));
        }
        const short = [...Array(25).keys()].map(() => { const due = out.next(640); out.add(640, {}); return due; });
        const lengths = ["off", "auto"].flatMap((early_unit) => [false, true].map((isNear) =>
            lib.Outgoing.length({ early_unit }, isNear)));
        const whole = out.next(16000); out.listenOnce(); const [first, all] = [out.demands(false), out.demands(true)];
        out.add(16000, first);
        return { found, short, lengths, whole, first, all, after: out.demands(false) };"""
    got = call(page, "live/conversation/outgoing.js", body)
    numbers = [[n for n, one in enumerate(got["found"], 1) if one[k]] for k in range(3)]
    assert numbers == [[6, 20, 30], [5, 19, 29], list(range(16, 25))], numbers
    left = [got["found"][n - 1][3] for n in (1, 9, 10, 14, 15, 23, 24)]
    assert left == [14_400, 1_600, 16_000, 9_600, 14_400, 1_600, 16_000], left
    assert got["lengths"] == [16000, 16000, 1600, 640]
    assert [sum(one[k] for one in got["short"]) for k in ("picture", "snap")] == [1, 1], got["short"]
    assert got["whole"] == {"picture": True, "snap": False}
    assert (got["first"], got["all"], got["after"]) == ({"force_listen": True}, {"force_listen": True}, {})


def test_late_answers_and_refusals_move_no_end_of_a_unit(page: Page) -> None:
    """The first unit ends early after 640 samples, and the second one 16 000 later, within a message; sound that is
    refused is in no unit.
    """
    body = """const out = new lib.Outgoing(); const sizes = [640, ...Array(9).fill(1600), 960, 1600];
        for (const n of sizes) out.add(n, {});
        sizes.forEach((_, i) => out.answered(i === 0 || i === 11));
        const late = out.rest;
        out.add(640, {}); out.refused();
        return [late, out.rest];"""
    assert call(page, "live/conversation/outgoing.js", body) == [15_040, 15_040]


def test_parts_of_a_wait_match_the_client(page: Page) -> None:
    stages = {"wait": 5.0, "first_sound": 75.0, "first_vocoder": 20.0}
    given = {"stages": stages, "lag_ms": 30.0, "shift_ms": 400.0}
    body = "return lib.waitOf(given, { sinceMs: 250, firstSound: 104 });"
    expected = {"alignment": 250, "saved": 400, "model": 80, "vocoder": 20, "transport": 4}
    assert call(page, "live/conversation/units.js", body, given) == expected
