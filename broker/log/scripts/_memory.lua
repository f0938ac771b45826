-- What an entry of the log takes of Redis's memory, as `penstock.broker.log.script` computes it.
-- Needs: run.

-- The payload as an allocator rounds it, the header in a node of the stream that is not full, keys and fields.
local function entry_bytes(payload, header)
  local _, exponent = math.frexp(payload + 15)
  local step = math.max(16, 2 ^ (exponent - 3))
  return math.ceil((payload + 16) / step) * step + math.ceil(header * 1.25) + ENTRY_OVERHEAD_BYTES
end

-- The bytes of an entry as XRANGE gives it. One without header ends a hole and is not counted.
local function held_bytes(entry)
  local header, size = entry[2][2], tonumber(entry[2][6])
  return header == '' and 0 or entry_bytes(size, #header)
end
