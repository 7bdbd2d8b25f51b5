"""A server that encrypts."""

import shutil
import ssl
import subprocess

import httpx2
import pytest
from served import BODY, line, serving

from jspec_serve.server import Listen

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def certificate(folder, name):
    """Paths of a new certificate for this machine and of its key."""
    made, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
            ),
            *("-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", key, "-out", made),
        ],
        check=True,
        capture_output=True,
    )
    return str(made), str(key)


@needs_openssl
def test_answers_are_encrypted_with_the_certificate(engines, tmp_path):
    made, key = certificate(tmp_path, "mine")
    with serving(engines["oracle"], tls=(made, key)) as served:
        assert served.url.startswith("https://127.0.0.1:")
        with httpx2.Client(verify=ssl.create_default_context(cafile=made), timeout=60) as client:
            reply = client.post(f"{served.url}/v1/completions", json=BODY | {"max_tokens": 3})
            assert reply.json()["choices"][0]["text"].split() == line(2, 3).split()
        with httpx2.Client(timeout=60) as client:
            with pytest.raises(httpx2.ConnectError, match="certificate"):
                client.get(f"{served.url}/health")
            with pytest.raises(httpx2.HTTPError):
                client.get(served.url.replace("https", "http") + "/health")


def test_files_that_are_no_certificate_are_refused(tmp_path):
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("nothing")
    for path in (tmp_path / "missing.pem", nothing):
        with pytest.raises(ValueError, match=r"tls_certificate: expected PEM files .*; check both"):
            Listen(tls_certificate=str(path), tls_key=str(path))


@needs_openssl
def test_a_certificate_with_another_key_is_refused(tmp_path):
    (mine, key), (other, _) = certificate(tmp_path, "mine"), certificate(tmp_path, "other")
    Listen(tls_certificate=mine, tls_key=key)
    with pytest.raises(ValueError, match="tls_certificate: expected PEM files"):
        Listen(tls_certificate=other, tls_key=key)
