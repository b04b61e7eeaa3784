"""The other sides of transfers: a repository, and archives in memory, in a folder, and on an S3 server on loopback."""

from __future__ import annotations

import importlib.util
import logging
import secrets
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from builders import FINEST_BLOCK, new_repository

HAS_S3 = all(importlib.util.find_spec(name) for name in ("s3fs", "moto", "flask"))
"""Whether the extra `test` is installed as a whole; CI has it."""


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The URL of an S3 server on loopback that fsspec's `s3://` leads to."""
    if not HAS_S3:
        pytest.skip("s3fs, or the server that moto has, is not installed")
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    before = fsspec.config.conf.get("s3")
    fsspec.config.conf["s3"] = {"endpoint_url": url, "key": "test", "secret": "test"}
    yield url
    if before is None:
        del fsspec.config.conf["s3"]
    else:
        fsspec.config.conf["s3"] = before
    server.stop()


@pytest.fixture
def s3(s3_server: str) -> str:
    """The URL of a folder in a new bucket."""
    bucket = f"test-{secrets.token_hex(8)}"
    fsspec.filesystem("s3").mkdir(bucket)
    return f"s3://{bucket}/archive"


@pytest.fixture(params=["repository", "memory", "file", "s3"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Another repository, and archives of three kinds."""
    if request.param == "repository":
        new_repository(tmp_path / "there", getattr(request.module, "BLOCK", FINEST_BLOCK)).close()
        yield str(tmp_path / "there")
    elif request.param == "file":
        yield f"file://{tmp_path}/archive"
    elif request.param == "s3":
        yield request.getfixturevalue("s3")
    else:
        yield f"memory://{tmp_path.name}"
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)
