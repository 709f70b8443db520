"""The application: origins of pages, unknown paths and methods."""

from tests.gateway.conftest import Gate, MakeGate

BODY = {"prompt": "the", "max_tokens": 8}
COMPLETIONS = "/v1/completions"


async def test_cors_allows_pages_of_named_origins(make_gate: MakeGate) -> None:
    gate = await make_gate(gateway={"allowed_origins": ("https://chat.example",)})
    asked = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    asked |= {"access-control-request-headers": "authorization,content-type"}
    before = await gate.http.options("/v1/completions", headers=asked)
    assert before.headers["access-control-allow-origin"] == "https://chat.example"
    assert "authorization" in before.headers["access-control-allow-headers"]
    reply = await gate.post("/v1/completions", {"n": 0}, origin="https://chat.example")
    assert reply.headers["access-control-allow-origin"] == "https://chat.example"
    assert "retry-after" in reply.headers["access-control-expose-headers"]
    other = await gate.post("/v1/completions", BODY, origin="https://other.example")
    assert "access-control-allow-origin" not in other.headers


async def test_other_paths_and_methods_are_rejected_in_openais_format(gate: Gate) -> None:
    for method, path, status in (("GET", "/v2", 404), ("GET", COMPLETIONS, 405), ("DELETE", "/v1/models", 405)):
        reply = await gate.http.request(method, path)
        assert reply.status_code == status and path in reply.json()["error"]["message"]
    reply = await gate.http.get("/v1/models/other")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
