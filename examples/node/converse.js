// node converse.js ADDRESS [--stream]: an agent with two tools asks a server of text, rewards it, and prints JSON.

import { parseArgs } from 'node:util';

import { TextClient } from './text.js';

const TOOLS = { add: () => '3', lookup: () => 'sea' };
const MOST_TURNS = 8;
const tools = Object.keys(TOOLS).map((name) => ({ type: 'function', function: { name, parameters: { type: 'object' } } }));

// The whole reply, and the text that was shown while it grew.
async function ask(conversation, messages, isStreamed) {
  if (!isStreamed) return { reply: await conversation.generate(messages, { tools }), shown: '' };
  let shown = '';
  for await (const part of conversation.stream(messages, { tools })) {
    if (part.reply) return { reply: part.reply, shown };
    shown += part.text;
  }
  throw new Error('the stream ended without a reply');
}

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: { stream: { type: 'boolean', default: false } },
});
if (positionals.length !== 1) {
  console.error('usage: node converse.js ADDRESS [--stream]');
  process.exit(2);
}

const client = new TextClient(positionals[0]);
try {
  const { run } = await client.describe();
  const conversation = await client.startConversation();
  const messages = [{ role: 'user', content: 'sum' }];
  const turns = [];
  while (turns.length < MOST_TURNS) {
    const { reply, shown } = await ask(conversation, messages, values.stream);
    const [{ message, token_ids }] = reply.answers;
    const { turn, version, learned } = reply;
    messages.push(message);
    turns.push({ turn, version, learned, token_ids, shown });
    if (!message.tool_calls.length) break;
    for (const call of message.tool_calls) {
      messages.push({ role: 'tool', tool_call_id: call.id, content: TOOLS[call.name]() });
    }
  }
  const said = messages.at(-1).content;
  const late = await conversation.reward(0.25, 0);
  const { total_return } = await conversation.end(said === 'done' ? 1 : 0);
  console.log(JSON.stringify({ run, said, turns, late, total_return }));
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
} finally {
  client.close();
}
