-- Read the events for audit.sql with DuckDB: put your files in place of 'events.jsonl'. A line that cannot be read is an error.
CREATE OR REPLACE TEMP TABLE events AS
SELECT type, id, source, reporter, reporterepoch AS epoch, try_cast(reporterseq AS BIGINT) AS number,
  epoch(try_cast(time AS TIMESTAMP)) AS seconds, data.Reason AS reason, data.LastReporterSeq AS claimed,
  data.PreviousEpoch AS previous, data.PreviousLastReporterSeq AS previous_last, data.Count AS lost,
  data.CloudEventIds AS listed, data.Vm.VmId AS vm_id, data IS NOT NULL AS has_data
FROM read_json('events.jsonl', format = 'newline_delimited', ignore_errors = false, maximum_object_size = 134217728,
  columns = {
    type: 'VARCHAR', id: 'VARCHAR', source: 'VARCHAR', time: 'VARCHAR',
    reporter: 'VARCHAR', reporterepoch: 'VARCHAR', reporterseq: 'VARCHAR',
    data: 'STRUCT(Reason VARCHAR, LastReporterSeq BIGINT, PreviousEpoch VARCHAR, PreviousLastReporterSeq BIGINT,
      Count BIGINT, CloudEventIds VARCHAR[], Vm STRUCT(VmId VARCHAR))'
  });

CREATE OR REPLACE TEMP VIEW listed AS
SELECT unnest(listed) AS id, reporter, epoch FROM events WHERE reporter IS NOT NULL;
