-- Notes which version a session fetches: the one that it is fetching, else the newest that it can have. A session
-- that has all versions being fetched takes the place of those that fetch the second oldest: slow sessions do not
-- keep the others from newer weights. Who loses it joins the oldest that it lacks, which is given up last: the
-- oldest of all never is.
-- ARGV: session, version that it has.
-- Reply: {version, its publication}; {0, ''} where nothing newer is published.
-- uses: run, fetches
redis.call('DEL', ABSENT)
local session, known = ARGV[1], tonumber(ARGV[2])
local version, given_up = fetching(session)
if version <= known or redis.call('HEXISTS', PUBLICATIONS, int(version)) == 0 then
  end_fetch(session)
  version = within_reach(session)
  local fetched = fetched_versions()
  if given_up then
    for i = #fetched, 1, -1 do
      if fetched[i] > known then version = fetched[i] end
    end
  end
  if version <= known and #fetched == MOST_FETCHED then
    redis.call('HDEL', FETCHES, int(fetched[2]))
    version = numbers(STATE, 'version')
  end
  if version <= known or redis.call('HEXISTS', PUBLICATIONS, int(version)) == 0 then return {0, ''} end
  if redis.call('EXISTS', SESSION .. session) == 1 then
    redis.call('HSET', SESSION .. session, 'fetches', version)
    redis.call('HINCRBY', FETCHES, int(version), 1)
  end
end
return {version, redis.call('HGET', PUBLICATIONS, int(version))}
