"""Where people and machines show in logs and settings: mail, addresses, serials, paths, hosts, users."""

from __future__ import annotations

import ipaddress
import re

MAIL = re.compile(r"(?<![\w.+%-])[\w.+%-]+@(?P<domain>(?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,})(?![\w-])")
UUID = re.compile(
    r"(?<![0-9A-Za-z])(?:(?:GPU|MIG)-)?[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(?![0-9A-Za-z])",
    re.IGNORECASE,
)
MAC = re.compile(r"(?<![0-9A-Za-z:.-])(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}(?![0-9A-Za-z:.-])", re.IGNORECASE)
IPV4 = re.compile(r"(?<![\w.-])(?:\d{1,3}\.){3}\d{1,3}(?![\w-]|\.\d)")
IPV6 = re.compile(r"(?<![\w:.])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?:%\w+)?(?![\w:])", re.IGNORECASE)
VERSION_BEFORE = re.compile(r"(?:version|driver|cudnn|nccl|cublas|cuda|==|>=|\bv)\W{0,3}$", re.IGNORECASE)
"""What stands before a version of four numbers, which is no address."""
SERIAL = re.compile(
    r"(?P<before>\b(?:serial(?:[ _-]?(?:number|num|no))?|S/N|service[ _-]?tag|asset[ _-]?tag)\b\W{0,4}(?:is\s+)?)"
    r"(?P<value>(?=[A-Z-]*\d)[A-Z0-9-]{5,})",
    re.IGNORECASE,
)
"""A serial number behind its name: it has a digit."""

PATH = re.compile(
    r"(?<=[\"'])(?:/home|/Users|/mnt|/media|/data)/[^\"'\n\\]+(?=[\"'])"
    r"|(?:(?<![\w/.<~\\-])|(?<=file://))(?:~[\w.-]*)?(?:/[^\s/\"'<>|:;,()\[\]{}\\*?`=&#]+)+/?"
    r"|(?<![A-Za-z])[A-Za-z]:\\{1,2}(?:[^\\\s\"'<>|:*?]+\\{1,2})*[^\\\s\"'<>|:*?]+"
)
"""An absolute path, or one below somebody's home. In quotes it may have spaces."""
KEPT_PATH = re.compile(
    r"/(?:v\d+(?:/|$)|(?:health|metrics|ping|version|tokenize|detokenize|load|soakrig|chat|completions|models|docs)(?:/|$)"
    r"|dev/(?:kmsg|null|stdout|stderr|shm/?$|nvidia[\w-]*$)|(?:proc|sys)/|etc/(?:hosts|os-release|modprobe\.d)"
    r"|usr/(?:local/)?(?:bin|sbin|lib\w*|include|share|cuda[-.\d]*)(?:/|$)|lib\w*/|bin/|sbin/)"
)
"""Paths that every machine has, and routes of servers."""
_ROOT_NAMES = "home Users root mnt media srv data opt tmp var workspace work scratch nix lustre gpfs app storage nfs"
ROOTS = frozenset(_ROOT_NAMES.split())
"""Names of folders that are worth hiding where nothing stands below them."""
INSTALLED = re.compile(r"/(?:site-packages|dist-packages|python3(?:\.\d+)?)/")
"""What lies below is a package's own, and the same everywhere."""
CODE_FILE = re.compile(r"[\w.-]+\.(?:py|pyx|so(?:\.\d+)*|c|cc|cpp|cu|cuh|h|hpp|rs)")

URL_HOST = re.compile(
    r"(?<![a-z0-9+.-])[a-z][a-z0-9+.-]*://(?:[^\s/@\"'<>]*@)?(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*)", re.IGNORECASE
)
DOMAIN = re.compile(
    r"(?<![\w@/.-])(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)"
    r"(?:(?:[A-Za-z0-9-]+\.)+(?:com|net|org|io|ai|dev|cloud|edu|gov|eu|de|uk|fr|ch|nl|at|it|es|pl|se|us|ca|jp|cn|info|local)"
    r"|(?:[A-Za-z0-9-]+\.)*(?:lan|internal|intranet|corp|localdomain|home\.arpa))(?![\w.-]*\w)",
    re.IGNORECASE,
)
PUBLIC = re.compile(
    r"(?:.*\.)?(?:github\.com|githubusercontent\.com|huggingface\.co|pytorch\.org|nvidia\.com|python\.org|pypi\.org|"
    r"pydantic\.dev|vllm\.ai|sglang\.ai|readthedocs\.io|kernel\.org|openai\.com)",
    re.IGNORECASE,
)
"""Hosts that everybody knows: an error message's link to its own documentation."""
LOOPBACK = frozenset({"localhost", "localhost.localdomain", "ip6-localhost", "localhost4", "localhost6"})

HOST_NAMED = re.compile(
    r"(?:\b|_)(?:host[_ ]?name|node[_ ]?name|fqdn|HOST|machine[_ ]?name)[\"']?\s*(?:[:=]|\sis\s)\s*[\"']?"
    r"(?P<host>[A-Za-z][A-Za-z0-9.-]+)",
    re.IGNORECASE,
)
SYSLOG_HOST = re.compile(
    r"^(?:<\d+>)?(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT[\d:.,+Z-]+) (?P<host>[A-Za-z0-9][\w.-]*) "
    r"[\w./()-]+(?:\[\d+\])?: ",
    re.MULTILINE,
)
LOGIN_AT = re.compile(r"(?<![\w.@/-])(?P<user>[a-z_][\w.-]*)@(?P<host>[A-Za-z][\w-]*)(?=[:\s]|$)", re.MULTILINE)
"""``user@host`` of a prompt or of ssh."""
USER_NAMED = re.compile(
    r"(?:\b|_)(?:user(?:[_ ]?name)?|logname|login|owner)[\"']?\s*[:=]\s*[\"']?(?P<user>[A-Za-z_][\w.-]*)"
    r"|\buid=\d+\((?P<uid>[\w.-]+)\)|\bfor user (?P<session>[\w.-]+)",
    re.IGNORECASE,
)
HOME_USER = re.compile(r"(?:/home|/Users|/export/home|\\Users\\{1,2}|%2Fhome%2F)[/\\]?(?P<user>[A-Za-z_][\w.-]*)")


def is_address(text: str) -> bool:
    """Whether it is an IP address that tells of somebody: no loopback, no wildcard."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified)


def is_public_host(host: str) -> bool:
    """Whether a host's name tells of nobody."""
    return host.lower() in LOOPBACK or PUBLIC.fullmatch(host) is not None
