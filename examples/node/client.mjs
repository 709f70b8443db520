// A client made from the protos alone: streams one answer.
// npm ci && node client.mjs [ADDRESS] [PROMPT], beside `betoken up`.
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const PROTOS = process.env.PROTOS ?? fileURLToPath(new URL("../../protos", import.meta.url));
const [address = "127.0.0.1:50051", prompt = "def fibonacci(n):"] = process.argv.slice(2);

const definition = protoLoader.loadSync("betoken/v1/generation.proto", {
  includeDirs: [PROTOS],
  keepCase: true,
  defaults: true, // a field at its default is not sent
  longs: String, // a seed has 64 bits
  enums: String,
  oneofs: true,
});
const { GenerationService } = grpc.loadPackageDefinition(definition).betoken.v1;
const client = new GenerationService(address, grpc.credentials.createInsecure());

const answer = client.Generate(
  { prompt, sampling: { temperature: 0.8, seed: "1", max_new_tokens: 64 } },
  { deadline: Date.now() + 60_000 },
);
answer.on("data", (message) => {
  if (message.event === "tokens") process.stdout.write(message.tokens.text);
  if (message.event === "finish") {
    const { reason, usage } = message.finish;
    process.stdout.write(`\n${usage.output_tokens} tokens, ${reason}\n`);
  }
});
answer.on("error", (error) => {
  process.stderr.write(`${grpc.status[error.code]}: ${error.details}\n`);
  process.exitCode = 1;
});
answer.on("close", () => client.close());
