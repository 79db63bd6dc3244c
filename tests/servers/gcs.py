"""A small server that speaks the XML API of Google Cloud Storage: `python gcs.py PORT`.

No package serves what obstore speaks to that service: the emulator on PyPI knows the JSON API
only and ignores generation preconditions, and Google's own testbench is not packaged, lacks the
XML lists and the XML multipart. So the tests have this one. Standard library only.

It does as the real service does in this:

* an object appears whole or not at all, and everybody sees it at once, also in lists;
* each version of an object has a generation; `x-goog-if-generation-match` is judged together
  with the write, 0 meaning that there must be no object: of many concurrent puts one wins;
* a body that is cut short leaves nothing;
* `Content-MD5` and the md5 of `x-goog-hash` are checked;
* ranges (206, and 416 past the end), `If-Match` and `If-None-Match` on reads;
* lists (`list-type=2`) are sorted by bytes, at most 1,000 entries a page, with prefix, delimiter,
  `start-after` and continuation tokens;
* multipart uploads: parts in any order, at least 5 MiB but for the last; nothing to be seen before
  they are completed; they can be listed (`?uploads`) and aborted;
* copies, with `x-goog-copy-source`;
* buckets must be made, else 404 `NoSuchBucket`.

It knows no rights, no limits of rate, no versions of old generations and no crc32c.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

PAGE = 1000
MIN_PART_NBYTES = 5 << 20
_GENERATIONS = itertools.count(int(time.time() * 1e6))


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Stored:
    """One generation of an object, or one part of an upload."""

    data: bytes
    etag: str
    generation: int
    modified_s: float

    @classmethod
    def of(cls, data: bytes) -> Stored:
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        return cls(data, etag, next(_GENERATIONS), time.time())


@dataclass(slots=True)
class Upload:
    """A multipart upload under way."""

    bucket: str
    key: str
    parts: dict[int, Stored] = field(default_factory=dict)


class Objects:
    """All buckets. Every method is atomic; the data comes in before it is called."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[str, dict[str, Stored]] = {}
        self._uploads: dict[str, Upload] = {}

    def make_bucket(self, bucket: str) -> None:
        with self._lock:
            if bucket in self._buckets:
                raise Refused(409, "BucketAlreadyOwnedByYou")
            self._buckets[bucket] = {}

    def put(self, bucket: str, key: str, data: bytes, expected: str | None) -> Stored:
        with self._lock:
            self._check_generation(bucket, key, expected)
            stored = self._bucket(bucket)[key] = Stored.of(data)
            return stored

    def get(self, bucket: str, key: str) -> Stored:
        with self._lock:
            return self._object(bucket, key)

    def delete(self, bucket: str, key: str, expected: str | None) -> None:
        with self._lock:
            self._object(bucket, key)
            self._check_generation(bucket, key, expected)
            del self._bucket(bucket)[key]

    def find(self, bucket: str, prefix: str) -> list[tuple[str, Stored]]:
        with self._lock:
            objects = self._bucket(bucket).items()
            found = [(key, stored) for key, stored in objects if key.startswith(prefix)]
        return sorted(found, key=lambda item: item[0].encode())

    def begin_upload(self, bucket: str, key: str) -> str:
        with self._lock:
            self._bucket(bucket)
            name = f"upload-{next(_GENERATIONS)}"
            self._uploads[name] = Upload(bucket, key)
            return name

    def put_part(self, name: str, number: int, data: bytes) -> Stored:
        with self._lock:
            part = self._upload(name).parts[number] = Stored.of(data)
            return part

    def complete(self, name: str, wanted: list[tuple[int, str]], expected: str | None) -> Stored:
        with self._lock:
            upload = self._upload(name)
            parts = [upload.parts.get(number) for number, _ in wanted]
            if not parts or any(
                part is None or part.etag.strip('"') != etag
                for part, (_, etag) in zip(parts, wanted, strict=True)
            ):
                raise Refused(400, "InvalidPart")
            whole = [part.data for part in parts if part is not None]
            if any(len(data) < MIN_PART_NBYTES for data in whole[:-1]):
                raise Refused(400, "EntityTooSmall")
            self._check_generation(upload.bucket, upload.key, expected)
            stored = Stored.of(b"".join(whole))
            self._bucket(upload.bucket)[upload.key] = stored
            del self._uploads[name]
            return stored

    def abort_upload(self, name: str) -> None:
        with self._lock:
            self._upload(name)
            del self._uploads[name]

    def uploads(self, bucket: str, prefix: str) -> list[tuple[str, str]]:
        with self._lock:
            self._bucket(bucket)
            return sorted(
                (upload.key, name)
                for name, upload in self._uploads.items()
                if upload.bucket == bucket and upload.key.startswith(prefix)
            )

    def _bucket(self, bucket: str) -> dict[str, Stored]:
        if bucket not in self._buckets:
            raise Refused(404, "NoSuchBucket")
        return self._buckets[bucket]

    def _object(self, bucket: str, key: str) -> Stored:
        stored = self._bucket(bucket).get(key)
        if stored is None:
            raise Refused(404, "NoSuchKey")
        return stored

    def _upload(self, name: str) -> Upload:
        if name not in self._uploads:
            raise Refused(404, "NoSuchUpload")
        return self._uploads[name]

    def _check_generation(self, bucket: str, key: str, expected: str | None) -> None:
        current = self._bucket(bucket).get(key)
        generation = 0 if current is None else current.generation
        if expected is not None and int(expected) != generation:
            raise Refused(412, "PreconditionFailed")


class Handler(BaseHTTPRequestHandler):
    """One connection. Paths are /BUCKET/KEY."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    objects = Objects()

    def do_PUT(self) -> None:
        self._answer()

    do_POST = do_GET = do_HEAD = do_DELETE = do_PUT

    def log_message(self, *words: object) -> None:
        """Silent: the tests make thousands of requests."""

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = parts.path.lstrip("/").partition("/")
        self.bucket, self.key = unquote(bucket), unquote(key)
        self.query = dict(parse_qsl(parts.query, keep_blank_values=True))
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if len(self.body) < int(self.headers.get("Content-Length") or 0):
            self.close_connection = True  # the client is gone: nothing may become visible
            return
        try:
            self._route()
        except Refused as error:
            text = f"<Error><Code>{error.code}</Code><Message>{error.code}</Message></Error>"
            self._reply(error.status, text)

    def _route(self) -> None:
        if not self.bucket:
            self._reply(200, "<ListAllMyBucketsResult></ListAllMyBucketsResult>")
        elif not self.key:
            self._route_bucket()
        elif "uploadId" in self.query:
            self._route_upload(self.query["uploadId"])
        elif self.command == "POST" and "uploads" in self.query:
            self._begin_upload()
        elif self.command == "PUT":
            self._put()
        elif self.command == "DELETE":
            self.objects.delete(self.bucket, self.key, self._expected())
            self._reply(204)
        elif self.command in ("GET", "HEAD"):
            self._get()
        else:
            raise Refused(405, "MethodNotAllowed")

    def _route_bucket(self) -> None:
        if self.command == "PUT":
            self.objects.make_bucket(self.bucket)
            self._reply(200)
        elif self.command in ("GET", "HEAD"):
            self._list_uploads() if "uploads" in self.query else self._list()
        else:
            raise Refused(405, "MethodNotAllowed")

    def _route_upload(self, name: str) -> None:
        if self.command == "PUT":
            self._check_digest()
            part = self.objects.put_part(name, int(self.query["partNumber"]), self.body)
            self._reply(200, ETag=part.etag)
        elif self.command == "POST":
            self._complete(name)
        elif self.command == "DELETE":
            self.objects.abort_upload(name)
            self._reply(204)
        else:
            raise Refused(405, "MethodNotAllowed")

    def _expected(self) -> str | None:
        return self.headers.get("x-goog-if-generation-match")

    def _check_digest(self) -> None:
        digest = base64.b64encode(hashlib.md5(self.body).digest()).decode()
        given = [self.headers.get("Content-MD5", "")]
        for item in self.headers.get("x-goog-hash", "").split(","):
            given += [item.strip()[len("md5=") :]] if item.strip().startswith("md5=") else []
        if any(text and text != digest for text in given):
            raise Refused(400, "BadDigest")

    def _put(self) -> None:
        self._check_digest()
        source = self.headers.get("x-goog-copy-source")
        data, text = self.body, ""
        if source:
            bucket, _, key = unquote(source).lstrip("/").partition("/")
            data = self.objects.get(bucket, key).data
        stored = self.objects.put(self.bucket, self.key, data, self._expected())
        if source:
            text = f"<CopyObjectResult><ETag>{escape(stored.etag)}</ETag></CopyObjectResult>"
        self._reply(200, text, **_headers(stored))

    def _get(self) -> None:
        stored = self.objects.get(self.bucket, self.key)
        match, none_match = self.headers.get("If-Match"), self.headers.get("If-None-Match")
        if match and match != "*" and stored.etag not in match:
            raise Refused(412, "PreconditionFailed")
        if none_match and (none_match == "*" or stored.etag in none_match):
            raise Refused(304, "NotModified")
        headers = {**_headers(stored), "Last_Modified": formatdate(stored.modified_s, usegmt=True)}
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        if wanted is None:
            self._reply(200, stored.data, **headers)
            return
        size = len(stored.data)
        start, stop = _range(wanted[1], wanted[2], size)
        headers["Content_Range"] = f"bytes {start}-{stop - 1}/{size}"
        self._reply(206, stored.data[start:stop], **headers)

    def _begin_upload(self) -> None:
        name = self.objects.begin_upload(self.bucket, self.key)
        text = (
            f"<InitiateMultipartUploadResult><Bucket>{escape(self.bucket)}</Bucket>"
            f"<Key>{escape(self.key)}</Key><UploadId>{name}</UploadId>"
            "</InitiateMultipartUploadResult>"
        )
        self._reply(200, text)

    def _complete(self, name: str) -> None:
        wanted = [
            (int(part.findtext("{*}PartNumber") or 0), (part.findtext("{*}ETag") or "").strip('"'))
            for part in ElementTree.fromstring(self.body).iterfind("{*}Part")
        ]
        stored = self.objects.complete(name, wanted, self._expected())
        text = (
            f"<CompleteMultipartUploadResult><Bucket>{escape(self.bucket)}</Bucket>"
            f"<Key>{escape(self.key)}</Key><ETag>{escape(stored.etag)}</ETag>"
            "</CompleteMultipartUploadResult>"
        )
        self._reply(200, text, **_headers(stored))

    def _list_uploads(self) -> None:
        found = self.objects.uploads(self.bucket, self.query.get("prefix", ""))
        text = "".join(
            f"<Upload><Key>{escape(key)}</Key><UploadId>{name}</UploadId></Upload>"
            for key, name in found
        )
        head = f"<Bucket>{escape(self.bucket)}</Bucket><IsTruncated>false</IsTruncated>"
        text = f"<ListMultipartUploadsResult>{head}{text}</ListMultipartUploadsResult>"
        self._reply(200, text)

    def _list(self) -> None:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        after = self.query.get("continuation-token") or self.query.get("start-after", "")
        limit = min(PAGE, int(self.query.get("max-keys", PAGE)))
        objects = self.objects.find(self.bucket, prefix)
        entries = _entries(objects, prefix, delimiter, after)
        page = list(itertools.islice(entries, limit))
        token = ""
        if next(entries, None) is not None:
            token = f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>"
        head = f"<IsTruncated>{'true' if token else 'false'}</IsTruncated>{token}"
        text = "".join(_entry(name, stored) for name, stored in page)
        self._reply(200, f"<ListBucketResult>{head}{text}</ListBucketResult>")

    def _reply(self, status: int, body: str | bytes = b"", **headers: str) -> None:
        data = body.encode() if isinstance(body, str) else body
        if isinstance(body, str) and body:
            headers["Content_Type"] = "application/xml"
        self.send_response(status)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD" and status not in (204, 304):
            self.wfile.write(data)


def _headers(stored: Stored) -> dict[str, str]:
    return {"ETag": stored.etag, "x_goog_generation": str(stored.generation)}


def _range(first: str, last: str, size: int) -> tuple[int, int]:
    """Start and end of what a Range header asks for."""
    if first:
        start, stop = int(first), min(int(last) + 1 if last else size, size)
    else:
        start, stop = max(0, size - int(last or 0)), size
    if start >= size:
        raise Refused(416, "InvalidRange")
    return start, stop


def _entries(
    objects: list[tuple[str, Stored]], prefix: str, delimiter: str, after: str
) -> Iterator[tuple[str, Stored | None]]:
    """What a list shows after the name `after`: objects, and folders as names without one."""
    last = after
    for key, stored in objects:
        inside = key[len(prefix) :]
        if delimiter and delimiter in inside:
            folder = prefix + inside.partition(delimiter)[0] + delimiter
            if folder.encode() > last.encode():
                yield folder, None
                last = folder
        elif key.encode() > after.encode():
            yield key, stored


def _entry(name: str, stored: Stored | None) -> str:
    if stored is None:
        return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
    modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.modified_s))
    return (
        f"<Contents><Key>{escape(name)}</Key><Size>{len(stored.data)}</Size>"
        f"<LastModified>{modified}</LastModified><ETag>{escape(stored.etag)}</ETag></Contents>"
    )


class Server(ThreadingHTTPServer):
    """A thread for each connection."""

    request_queue_size = 256
    daemon_threads = True


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
