"""Sampling: functions of parameters, from ids to ids (`generate`) and from chats to texts (`engine`)."""
