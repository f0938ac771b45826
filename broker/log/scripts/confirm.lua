-- Does nothing: that it runs says that the layout and the incarnation are those that the caller knows.
-- Reply: {'OK'}.
return {'OK'}
