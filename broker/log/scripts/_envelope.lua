-- What every script answers: {layout, incarnation, its own reply}. Without the third it has not run: the keys
-- have another layout, or the caller knows another incarnation, which is the last of the arguments ('': any).
-- Needs: run.

local function answer_in_envelope(script)
  local known = table.remove(ARGV)
  read_start()
  local incarnation = at_start.incarnation
  local layout = tonumber(at_start.layout or at_start.run and FIRST_LAYOUT or LAYOUT)
  local is_readable = layout == LAYOUT or layout < LAYOUT and READS_EARLIER == 1
  if not is_readable or known ~= '' and known ~= (incarnation or '') then
    return {layout, incarnation or ''}
  end
  local reply = script()
  return {LAYOUT, incarnation or '', reply or false}
end
