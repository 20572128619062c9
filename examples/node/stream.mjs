// Stream a completion over gRPC to its end, whatever happens to the frontend that it comes from.
//
//     node stream.mjs [--prompt TEXT] [--max-tokens N] [--deadline-s SECONDS] [--ca FILE] [ADDRESS ...]
//
// ADDRESS is host:port of a frontend's gRPC port (127.0.0.1:50051). With --ca the connection is TLS, checked against
// the authorities (PEM) in FILE. The variable API_KEY holds the key, where the server asks for one.
//
// Every response says where its tokens stand (index, offset). When the connection breaks, the next address is asked with
// resume_from: the response's id, and how many tokens are here already.

import { readFileSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

const PROTOS = fileURLToPath(new URL('../../protos', import.meta.url));
const GIVE_UP_MS = 25_000; // the scheduler keeps a stream without a frontend for 30 seconds (--orphan-lease)
const RETRY_MS = 200;

const { values: options, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    prompt: { type: 'string', default: 'Once upon a time' },
    'max-tokens': { type: 'string', default: '100' },
    'deadline-s': { type: 'string', default: '60' },
    ca: { type: 'string' },
  },
});
const addresses = positionals.length > 0 ? positionals : ['127.0.0.1:50051'];
const deadline = Date.now() + 1000 * Number(options['deadline-s']); // of the whole completion, all attempts together

const definition = protoLoader.loadSync('pagoda/v1/inference.proto', {
  includeDirs: [PROTOS],
  keepCase: true, // field names as in the contract
  enums: String,
  longs: String, // 64 bits do not fit a number
  defaults: true,
});
const { Inference } = grpc.loadPackageDefinition(definition).pagoda.v1;

const credentials = options.ca
  ? grpc.credentials.createSsl(readFileSync(options.ca))
  : grpc.credentials.createInsecure();
const metadata = new grpc.Metadata();
if (process.env.API_KEY) {
  metadata.set('authorization', `Bearer ${process.env.API_KEY}`);
}

/** The responses of one completion, each once. */
async function* responses(request) {
  const received = [{ num_tokens: 0, is_finished: false }];
  let giveUp = Date.now() + GIVE_UP_MS;
  for (let attempt = 0; ; attempt++) {
    const address = addresses[attempt % addresses.length];
    const client = new Inference(address, credentials);
    try {
      for await (const response of client.Generate(request, metadata, { deadline })) {
        if (response.token_ids.length > 0) {
          received[0].num_tokens = response.offset + response.token_ids.length;
        }
        received[0].is_finished = response.finish_reason !== 'FINISH_REASON_UNSPECIFIED';
        request = { resume_from: { request_id: response.request_id, received } };
        giveUp = Date.now() + GIVE_UP_MS;
        yield response;
      }
      return;
    } catch (error) {
      if (error.code !== grpc.status.UNAVAILABLE || Date.now() > giveUp) {
        throw error;
      }
      console.error(`[${address}: ${error.details}]`);
    } finally {
      client.close();
    }
    await sleep(RETRY_MS);
  }
}

try {
  const request = {
    text: options.prompt,
    sampling_params: { temperature: 0, max_tokens: Number(options['max-tokens']) },
  };
  for await (const response of responses(request)) {
    process.stdout.write(response.text);
    if (response.usage) {
      console.error(`\n[${response.finish_reason}, ${response.usage.num_output_tokens} tokens]`);
    }
  }
  process.stdout.write('\n');
} catch (error) {
  if (error.code === undefined) {
    throw error; // no status: a bug
  }
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
}
