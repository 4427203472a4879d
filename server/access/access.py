"""Who may do what: the identity of each request, and the routes that need none, or an administrator's."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import Scope

from server.access.client_secrets import ClientSecrets
from server.access.clients import Clients
from server.access.credentials import Credential, CredentialSource
from server.access.forwarded import forwarded_identity
from server.access.identity import Identity, IdentityKind, address_of
from server.access.keys import ApiKeys, api_keys_of
from server.access.limit import Limit
from server.access.page_cookie import FILE_NAME as COOKIE_FILE
from server.access.page_cookie import PageCookies, SignInLinks
from server.access.refusal import AccessRefusedError
from server.access.usage import DayUsage, file_name
from worker.config.service import Config
from worker.key_text import SECRET_PREFIX

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
SIGN_IN = "/api/access"
# What needs no key. Orchestrators and the launcher ask for the state of the process, which names no session.
PUBLIC = frozenset(
    {*((method, path) for path in ("/health", "/livez", "/readyz") for method in ("GET", "HEAD")), ("POST", SIGN_IN)}
)
# What concerns everyone: pattern of the path -> whether reading needs an administrator too.
ADMIN: dict[re.Pattern[str], bool] = {
    re.compile(r"/api/admin(/.*)?"): True,
    re.compile(r"/api/config/eta"): True,
    re.compile(r"/api/access/keys"): True,
    re.compile(r"/workers/[^/]+/compile_report"): True,
    re.compile(r"/api/assets/ref_audio(/.*)?"): False,
    re.compile(r"/api/presets(/.*)?"): False,
}
# Where ephemeral secrets are accepted.
SECRET_PATHS = re.compile(r"(/v1)?/(realtime|live)(/.*)?")


@dataclass(frozen=True)
class Access:
    """Everything that the guard and the routes of keys use."""

    keys: ApiKeys
    usage: DayUsage
    clients: Clients
    secrets: ClientSecrets
    cookies: PageCookies
    links: SignInLinks
    count: Callable[[Limit], None]
    cluster_secret: str | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        config: Config,
        count: Callable[[Limit], None],
        start_key: str | None = None,
        cluster_secret: str | None = None,
        gateway: str = "",
    ) -> "Access":
        """The access of a configuration.

        Args:
            config: settings.
            count: counts that a client has reached a limit.
            start_key: a key for this run, with an administrator's rights; None: none.
            cluster_secret: of the gateways that may pass connections on; None: there are none.
            gateway: name of this one in its cluster; "": there is no cluster.
        Raises:
            ConfigError; SettingsError.
        """
        folder = config.service.data_dir
        keys, usage = api_keys_of(config, start_key), DayUsage(folder / file_name(gateway))
        clients, cookies = Clients(config.service.limits, usage, count), PageCookies(folder / COOKIE_FILE)
        return cls(keys, usage, clients, ClientSecrets(), cookies, SignInLinks(), count, cluster_secret)

    def identify(self, scope: Scope, credential: Credential | None) -> Identity:
        """The identity of a request or of a WebSocket. Raises: AccessRefusedError for one without a valid key."""
        forwarded = forwarded_identity(scope, self.cluster_secret)
        if forwarded is not None:
            return forwarded
        address = address_of(scope)
        found = None if credential is None else self._found(scope, credential, address)
        if found is not None:
            return found
        if not self.keys.required:
            return Identity(address=address)
        if needs_no_key(scope):
            return Identity(kind=IdentityKind.ANONYMOUS, address=address)
        got = "none" if credential is None else f"another one in the {credential.source}"
        raise AccessRefusedError(401, "key", expected="a valid API key", got=got)

    def _found(self, scope: Scope, credential: Credential, address: str) -> Identity | None:
        text, source = credential
        if source is CredentialSource.COOKIE:
            key = self.cookies.find(text, self.keys)
            return None if key is None else key.identity(address)
        if text.startswith(SECRET_PREFIX):
            return self.secrets.find(text, self.keys, address) if SECRET_PATHS.fullmatch(scope["path"]) else None
        key = self.keys.find(text)
        return None if key is None else key.identity(address)

    def check(self, identity: Identity, scope: Scope) -> None:
        """Check rights and count the request, once in a cluster. Raises: AccessRefusedError."""
        if identity.is_forwarded:
            return
        self.clients.count_request(identity, scope["path"])
        if needs_admin(scope) and not identity.is_admin:
            raise AccessRefusedError(403, scope["path"][:100], expected="an administrator's key", got=_shown(identity))
        if scope["type"] == "websocket":
            self.usage.check_minutes(identity)
        if scope["type"] == "websocket" or scope["method"] not in SAFE_METHODS:
            self.usage.count_request(identity)


def needs_no_key(scope: Scope) -> bool:
    """Whether the request needs no key."""
    return scope["type"] == "http" and (scope["method"], scope["path"]) in PUBLIC


def needs_admin(scope: Scope) -> bool:
    """Whether the request needs an administrator."""
    if scope["type"] != "http":
        return False
    is_change = scope["method"] not in SAFE_METHODS
    return any((is_change or reading) and path.fullmatch(scope["path"]) for path, reading in ADMIN.items())


def _shown(identity: Identity) -> str:
    if identity.has_key:
        return f"the key {identity.name}"
    return "no key, from another machine"
