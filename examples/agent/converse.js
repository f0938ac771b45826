// An agent with two tools, as it would be written for any model behind OpenAI's API. A Penstock run learns from it:
//
//     node converse.js http://127.0.0.1:8765/v1 [--stream]
//
// Two lines are Penstock's: `metadata` names the conversation, and a reward is posted for it. It prints what was said.

import { randomUUID } from 'node:crypto';
import OpenAI from 'openai';

const TOOLS = { add: () => '3', lookup: () => 'sea' };
const MOST_TURNS = 8;

const [baseURL, ...flags] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: 'none' });
const conversation = randomUUID();
const tools = Object.keys(TOOLS).map((name) => ({ type: 'function', function: { name, parameters: { type: 'object' } } }));

async function ask(messages) {
  const request = { model: 'default', messages, tools, metadata: { conversation_id: conversation } };
  if (!flags.includes('--stream')) {
    const made = await client.chat.completions.create(request);
    return { message: made.choices[0].message, penstock: made.penstock };
  }
  const message = { role: 'assistant', content: '' };
  let penstock;
  for await (const part of await client.chat.completions.create({ ...request, stream: true })) {
    penstock = part.penstock ?? penstock;
    const delta = part.choices[0]?.delta ?? {};
    message.content += delta.content ?? '';
    message.tool_calls ??= delta.tool_calls;
  }
  return { message, penstock };
}

const messages = [{ role: 'user', content: 'sum' }];
const turns = [];
while (turns.length < MOST_TURNS) {
  const { message, penstock } = await ask(messages);
  messages.push(message);
  turns.push(penstock);
  if (!message.tool_calls?.length) break;
  for (const call of message.tool_calls) {
    messages.push({ role: 'tool', tool_call_id: call.id, content: TOOLS[call.function.name]() });
  }
}
const said = messages.at(-1).content;
const reward = said === 'done' ? 1 : 0;
const result = await client.post('/rewards', { body: { conversation_id: conversation, reward, final: true } });
console.log(JSON.stringify({ said, turns, total_return: result.total_return }));
