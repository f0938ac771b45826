-- Renews a session that fetches weights; with the last chunk its fetch is over.
-- ARGV: session, version, offset. Reply: the publication, or nil where its bytes are gone.
-- uses: run, fetches, sessions
redis.call('DEL', ABSENT)
local session, version = ARGV[1], tonumber(ARGV[2])
renew_session(session, now_ms())
local publication = redis.call('HGET', PUBLICATIONS, ARGV[2])
if publication and fetching(session) == version then
  local size = tonumber(string.match(publication, '(%d+) %d+$'))
  if ARGV[3] + WEIGHT_CHUNK_BYTES >= size then end_fetch(session) end
end
return publication
