-- Ends a session after its drain.
-- ARGV: session. Reply: 1 when it was open, else 0.
-- uses: run, sessions, credit, turns
redis.call('DEL', ABSENT)
if not close_session(ARGV[1]) then return 0 end
share_out(false)
return 1
