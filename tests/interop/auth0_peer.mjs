// A stranger with @auth0/cose: checks or makes attestations.
// Reads a JSON list of requests from standard input, writes one of answers to standard output.
import { readFileSync } from "node:fs";
import { Algorithms, COSEKey, Headers, Sign1 } from "@auth0/cose";

const bytes = (text) => new Uint8Array(Buffer.from(text, "hex"));
const hex = (data) => Buffer.from(data).toString("hex");
const plain = (value) => (value instanceof Uint8Array ? hex(value) : value);

async function verify(asked) {
  const message = Sign1.decode(bytes(asked.attestation));
  const key = await COSEKey.import(bytes(asked.key)).toKeyLike();
  let verified = true;
  try {
    await message.verify(key, { detachedPayload: bytes(asked.digest), algorithms: [Algorithms.EdDSA] });
  } catch (error) {
    if (error.code !== "ERR_COSE_SIGNATURE_VERIFICATION_FAILED") throw error;
    verified = false;
  }
  const header = message.protectedHeaders;
  const claims = Object.fromEntries([...header.get(15)].map(([label, value]) => [label, plain(value)]));
  return {
    verified,
    kind: message.constructor.name,
    alg: message.alg,
    kid: hex(message.kid),
    claims,
    typ: header.get(16),
    hash: header.get(258),
    content: header.get(259),
    unprotected: message.unprotectedHeaders.size,
    detached: message.payload === null || message.payload === undefined,
  };
}

async function sign(asked) {
  const jwk = { kty: "OKP", crv: "Ed25519", x: base64url(asked.x), d: base64url(asked.d) };
  const key = await COSEKey.fromJWK(jwk).toKeyLike();
  const claims = new Map([
    [1, asked.iss],
    [2, asked.sub],
    [3, asked.aud],
    [4, asked.exp],
    [5, asked.nbf],
    [6, asked.iat],
    [7, bytes(asked.cti)],
    ...asked.terms,
    ...(asked.anchor ? [[-65543, bytes(asked.anchor)]] : []),
  ]);
  const header = new Map([
    [Headers.Algorithm, Algorithms.EdDSA],
    [Headers.KeyID, bytes(asked.kid)],
    [15, claims],
    [16, asked.typ],
    [258, -16],
    [259, asked.content],
  ]);
  const message = await Sign1.sign(header, new Map(), bytes(asked.digest), key);
  message.payload = null; // the library signs attached payloads only: taken out, it is a detached one
  return { attestation: hex(message.encode()) };
}

const base64url = (text) => Buffer.from(text, "hex").toString("base64url");
const actions = { verify, sign };
const answers = [];
for (const asked of JSON.parse(readFileSync(0, "utf8"))) answers.push(await actions[asked.action](asked));
process.stdout.write(JSON.stringify(answers));
