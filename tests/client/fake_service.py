"""A service that does nothing but start, connect and stop as the real ones do; run as a process by tests."""

import argparse
import json
import os
import pathlib
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import grpc

from betoken.v1 import generation_pb2 as pb
from betoken.v1 import generation_pb2_grpc

parser = argparse.ArgumentParser()
NAMES = (
    "host port ready-file verify draft tokenizer model dtype compile threads drafters attached-drafters"
    " early-exit-model target-tokenizer lookahead-model medusa eagle3 dflash pard gemma4-assistant"
    " tls-cert-file tls-key-file router router-tls-ca-file router-tls-server-name"
)
for name in NAMES.split():
    parser.add_argument("--" + name, default="")
parser.add_argument("--router-tls", action="store_true")
parser.add_argument("--remark", default="")
parser.add_argument("--fail", action="store_true")
parser.add_argument("--lonely", action="store_true")
parser.add_argument("--stubborn", action="store_true")
parser.add_argument("--polite", action="store_true")
parser.add_argument("--leisurely", action="store_true")
parser.add_argument("--idle", action="store_true")
parser.add_argument("--held", action="store_true")
options = parser.parse_args()
sys.stdout.write(f"options {json.dumps(vars(options))}\n")
sys.stdout.flush()
if options.fail:
    sys.exit("the weights are missing")
if options.idle:
    time.sleep(600)
if options.stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

if options.polite:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

if options.leisurely:

    def end(*_):
        time.sleep(0.3)
        sys.exit("ended by itself")

    signal.signal(signal.SIGTERM, end)


class Service(generation_pb2_grpc.GenerationServiceServicer):
    def GetModelInfo(self, request, context):
        if options.lonely:
            sys.stdout.write("asked\n")
            sys.stdout.flush()
            time.sleep(2)
            context.abort(grpc.StatusCode.UNAVAILABLE, "no verify worker became ready: refused")
        workers = {
            role: [
                pb.WorkerInfo(address=a, state="ready", detail=options.remark if role == "draft" else "")
                for a in getattr(options, role).split(",")
                if a
            ]
            for role in ("verify", "draft")
        }
        return pb.GetModelInfoResponse(model="fake", verify_workers=workers["verify"], draft_workers=workers["draft"])


ready = pathlib.Path(options.ready_file)


def replace(path, value):
    partial = path.with_name("." + path.name)
    partial.write_text(json.dumps(value))
    partial.replace(path)


replace(ready.with_name(ready.name + ".progress"), {"stage": "warming up", "fraction": 0.5})
while options.held and not ready.with_name("go").exists():  # until its progress was seen
    time.sleep(0.02)
server = grpc.server(ThreadPoolExecutor(2))
generation_pb2_grpc.add_GenerationServiceServicer_to_server(Service(), server)
is_unix = options.host.startswith("unix:")
address = options.host if is_unix else f"{options.host}:{options.port}"
if options.tls_cert_file:
    pair = tuple(pathlib.Path(file).read_bytes() for file in (options.tls_key_file, options.tls_cert_file))
    port = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
else:
    port = server.add_insecure_port(address)
server.start()
replace(ready, {"port": port, "pid": os.getpid()})
while True:
    time.sleep(1)
