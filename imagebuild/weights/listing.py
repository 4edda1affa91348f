"""What files a checkpoint has, from a model hub, any web server with SHA256SUMS, or a folder.

It lists and opens nothing else; the hub's address comes from HF_ENDPOINT or the recipe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote, urljoin, urlsplit

from imagebuild.errors import EngineError, IntegrityError, UsageError
from imagebuild.sources.http import Http, Reply
from imagebuild.sources.pipconf import scrub

SUMS = "SHA256SUMS"
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_SUM = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_NEXT = re.compile(r'<([^>]+)>\s*;\s*rel="?next"?')
_LONGEST_NAME = 255 - len(".part")  # bytes, on Linux
_MOST_FILES = 100_000  # of a checkpoint; a hub that lists more does not end
RECORD = "weights.json"  # ours, of an earlier fetch; never a file of the checkpoint


@dataclass(frozen=True)
class WeightFile:
    """One file of a checkpoint.

    Attributes:
        path: relative to the checkpoint's folder.
        url: where its bytes are; `file:` for a folder.
        size: bytes; None where the source does not say it.
        sha256: of the content; None where the source has only `git_sha1`, or nothing.
        git_sha1: of the git blob, which a hub gives for small files.
    """

    path: str
    url: str
    size: int | None
    sha256: str | None = None
    git_sha1: str | None = None


@dataclass(frozen=True)
class Listing:
    """A checkpoint as its source describes it.

    Attributes:
        source: what was asked for, without credentials.
        revision: the hub's commit; None elsewhere.
        licence: as the model card says it, or a sentence that nobody says it.
        files: sorted by path.
    """

    source: str
    revision: str | None
    licence: str
    files: tuple[WeightFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files whose size is known."""
        return sum(file.size or 0 for file in self.files)


def read_listing(source: str, http: Http, *, hub: str, token: str | None, revision: str) -> Listing:
    """Lists a checkpoint.

    Args:
        source: a folder, an http(s) address of one with SHA256SUMS, or OWNER/NAME on the hub.
        http: where to ask.
        hub: the hub's address.
        token: the hub's, for repositories that ask for one.
        revision: branch, tag or commit on the hub.

    Raises:
        UsageError: it is none of the three.
        EngineError: it does not answer.
        IntegrityError: what it says cannot be a list of files.
    """
    if _scheme(source) in ("http", "https"):
        return _from_web(source, http)
    if Path(source).is_dir():
        return _from_folder(Path(source))
    if _REPOSITORY.fullmatch(source) and not source.startswith((".", "/")):
        if _scheme(hub) not in ("http", "https"):
            raise UsageError(f"HF_ENDPOINT={scrub(hub)}: expected an http address, found another")
        return _from_hub(source, http, hub.rstrip("/"), token, revision)
    raise UsageError(f"{scrub(source)}: expected OWNER/NAME, an http address or a folder, "
                     "found none of them")  # fmt: skip


def _scheme(address: str) -> str:
    try:
        return urlsplit(address).scheme
    except ValueError as error:  # such as http://[
        raise UsageError(f"{scrub(address)}: expected an http address, found that it is malformed "
                         f"({error})") from error  # fmt: skip


def hub_headers(token: str | None) -> dict[str, str]:
    """What says who asks the hub."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def checked_path(text: str, where: str) -> str:
    """A relative path that stays below its folder. Raises IntegrityError."""
    path = PurePosixPath(text)
    # isprintable: neither lone surrogates, which are no file name, nor codes of a terminal.
    bad = path.is_absolute() or ".." in path.parts or "\\" in text or not text.isprintable()
    bad = bad or any(len(part.encode()) > _LONGEST_NAME for part in path.parts)
    if bad or not text or str(path) != text or text.startswith("."):
        raise IntegrityError(f"{where}: expected names of files below the checkpoint, "
                             f"found {text!r}")  # fmt: skip
    return text


def _from_hub(name: str, http: Http, hub: str, token: str | None, revision: str) -> Listing:
    where = f"{scrub(hub)}/{name}"
    headers = hub_headers(token)
    address = f"{hub}/api/models/{name}/revision/{quote(revision, safe='')}"
    try:
        reply = _ask(http, address, f"the model {name} at {revision}", headers)
    except EngineError as error:
        error.hint = f"{error.hint}; HF_ENDPOINT names a mirror" if error.hint else None
        raise
    answer = _json(reply, where)
    model = answer if isinstance(answer, dict) else {}
    commit = model.get("sha")
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise IntegrityError(f"{where}: expected the commit of {revision}, found {commit!r}")
    card = model.get("cardData")
    licence = card.get("license_name") or card.get("license") if isinstance(card, dict) else None
    entries = _pages(http, f"{hub}/api/models/{name}/tree/{commit}?recursive=true", where, headers)
    files = [_hub_file(entry, f"{hub}/{name}/resolve/{commit}", where) for entry in entries
             if entry.get("type") == "file" and not _is_hidden(entry)]  # fmt: skip
    said = str(licence) if licence else "not said by its model card"
    return Listing(name, commit, said, _sorted(files, where))


def _is_hidden(entry: dict[str, object]) -> bool:
    # .gitattributes and the like belong to the repository, not to the checkpoint.
    return re.match(r"\.[^./]", str(entry.get("path", ""))) is not None


def _pages(
    http: Http, url: str, where: str, headers: dict[str, str]
) -> Iterator[dict[str, object]]:
    seen: set[str] = set()
    count = 0
    next_page: str | None = url
    while next_page:
        if next_page in seen or count > _MOST_FILES:
            raise IntegrityError(f"{where}: expected a list of files that ends, found none")
        seen.add(next_page)
        reply = _ask(http, next_page, f"the files of {where}", headers)
        entries = _json(reply, where)
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise IntegrityError(f"{where}: expected a list of files, found other JSON")
        yield from entries
        count += len(entries)
        match = _NEXT.search(reply.headers.get("Link", ""))
        next_page = _on_same_host(url, next_page, match[1], where) if match else None


def _on_same_host(url: str, page: str, link: str, where: str) -> str:
    """Where a link of a page leads: a token goes to its own host, and by no weaker scheme."""
    try:
        address = urljoin(page, link)
        if urlsplit(address)[:2] == urlsplit(url)[:2]:
            return address
    except ValueError:  # such as http://[
        pass
    raise IntegrityError(f"{where}: expected the next page on the same host, found {scrub(link)}")


def _hub_file(entry: dict[str, object], base: str, where: str) -> WeightFile:
    path = checked_path(str(entry.get("path", "")), where)
    large = entry.get("lfs")
    size, oid = entry.get("size"), entry.get("oid")
    sha256 = large.get("oid") if isinstance(large, dict) else None
    if not isinstance(size, int) or size < 0:
        raise IntegrityError(f"{where}: expected the size of {path}, found {size!r}")
    if sha256 is not None and not re.fullmatch(r"[0-9a-f]{64}", str(sha256)):
        raise IntegrityError(f"{where}: expected a sha256 for {path}, found {sha256!r}")
    if sha256 is None and not re.fullmatch(r"[0-9a-f]{40}", str(oid)):
        raise IntegrityError(f"{where}: expected a hash for {path}, found {oid!r}")
    url = f"{base}/{quote(path)}"
    return WeightFile(path, url, size, sha256, None if sha256 else str(oid))


def _from_web(source: str, http: Http) -> Listing:
    base = source.rstrip("/")
    where = scrub(base)
    reply = http.get(f"{base}/{SUMS}", what=f"{SUMS}, which lists the files and their hashes",
                     accept=(200, 404))  # fmt: skip
    if reply.status == 404:
        raise UsageError(f"{where}: expected {SUMS} beside the files, found none",
                         hint=f"make one where they are: sha256sum * > {SUMS}")  # fmt: skip
    sums = _sums(reply.body, f"{where}/{SUMS}")
    files = [WeightFile(path, f"{base}/{quote(path)}", None, sha) for path, sha in sums.items()]
    return Listing(where, None, "not said by this mirror", _sorted(files, where))


def _from_folder(folder: Path) -> Listing:
    sums_file = folder / SUMS
    sums: dict[str, str] = {}
    if sums_file.is_file():
        sums = _sums(sums_file.read_bytes(), str(sums_file))
        missing = [path for path in sums if not (folder / path).is_file()]
        if missing:
            raise IntegrityError(f"{folder}: expected {len(sums)} files that {SUMS} names, "
                                 f"found no {', '.join(missing[:5])}")  # fmt: skip
    paths: dict[str, str | None] = {**sums} or {
        path.relative_to(folder).as_posix(): None
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in
                                      path.relative_to(folder).parts)
    }  # fmt: skip
    files = [WeightFile(path, (folder / path).resolve().as_uri(), (folder / path).stat().st_size,
                        sums.get(path)) for path in paths]  # fmt: skip
    return Listing(str(folder), None, "not said by a folder", _sorted(files, str(folder)))


def _sums(body: bytes, where: str) -> dict[str, str]:
    try:
        lines = body.decode().splitlines()
    except UnicodeDecodeError as error:
        raise IntegrityError(f"{where}: expected text, found other bytes") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        match = _SUM.fullmatch(line.strip())
        if match is None:
            raise IntegrityError(
                f"{where}, line {number}: expected a hash and a name, found {line[:80]!r}"
            )
        path = checked_path(match[2].removeprefix("./"), f"{where}, line {number}")
        if path == SUMS:
            continue  # `sha256sum * > SHA256SUMS`, for the second time
        if found.setdefault(path, match[1]) != match[1]:
            raise IntegrityError(f"{where}, line {number}: expected one hash of {path}, found two")
    return found


def _sorted(files: list[WeightFile], where: str) -> tuple[WeightFile, ...]:
    # In a folder that was fetched itself, or in its SHA256SUMS.
    files = [file for file in files if file.path != RECORD]
    if not files:
        raise IntegrityError(f"{where}: expected the files of a checkpoint, found none")
    by_path = {file.path: file for file in files}
    if len(by_path) != len(files):
        raise IntegrityError(f"{where}: expected each file once, found some twice")
    if parts := sorted(path for path in by_path if path.endswith(".part")):
        raise IntegrityError(f"{where}: expected whole files, found {', '.join(parts[:5])}",
                             hint="a fetch into it did not end; run that again")  # fmt: skip
    return tuple(by_path[path] for path in sorted(by_path))


def _ask(http: Http, url: str, what: str, headers: dict[str, str]) -> Reply:
    reply = http.get(url, what=what, headers=headers, accept=(200, 401, 403, 404),
                     own_auth=bool(headers))  # fmt: skip
    if reply.status == 200:
        return reply
    hint = {
        401: "check the name, or set HF_TOKEN to a token that may read it",
        403: "accept the model's terms on its page, and set HF_TOKEN",
        404: "check the name and --revision",
    }[reply.status]
    raise EngineError(f"{scrub(url)}: expected {what}, found status {reply.status}", hint=hint)


def _json(reply: Reply, where: str) -> object:
    try:
        return json.loads(reply.body)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{where}: expected JSON of a model hub, found {reply.body[:60]!r}",
                          hint="HF_ENDPOINT names the hub's address") from error  # fmt: skip
