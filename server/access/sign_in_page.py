"""The page that a browser without a key gets in place of any other page. It needs no other file.

It takes the key or the link's token from the fragment of its address, which browsers send to no server, or from its
form, exchanges it for the cookie, removes it from the address and loads the page that was asked for.
"""

import base64
from hashlib import sha256

SCRIPT = """
const form = document.getElementById("form");
const note = document.getElementById("note");
const signIn = async (key) => {
  const response = await fetch("/api/access", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ key }),
  });
  if (response.ok) location.reload();
  else note.hidden = false;
};
form.addEventListener("submit", (event) => {
  event.preventDefault();
  signIn(form.elements.key.value.trim());
});
const key = location.hash.slice(1);
if (/^(duo|link)_/.test(key)) {
  history.replaceState(null, "", location.pathname + location.search);
  signIn(key);
} else if (!sessionStorage.duologue_reloaded) {
  // A link on another site's page brings no SameSite=Strict cookie; a reload does.
  sessionStorage.duologue_reloaded = "1";
  fetch("/api/access").then((response) => { if (response.ok) location.reload(); });
}
"""
STYLE = """
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 30rem; margin: 15vh auto; padding: 0 1rem; }
input { font: inherit; width: 100%; box-sizing: border-box; padding: .5rem; margin: .25rem 0 1rem; }
button { font: inherit; padding: .5rem 1.5rem; }
"""
SIGN_IN_PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Sign in · 登录</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>Sign in · <span lang="zh">登录</span></h1>
<form id="form">
<label for="key">This server needs a key. <span lang="zh">此服务器需要密钥。</span></label>
<input id="key" name="key" type="password" autocomplete="current-password" required>
<button>OK</button>
<p id="note" role="alert" hidden>The key or link is not valid. <span lang="zh">密钥或链接无效。</span></p>
</form>
</main>
<script type="module">{SCRIPT}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"


SIGN_IN_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src {_hash(SCRIPT)}; style-src {_hash(STYLE)}; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
