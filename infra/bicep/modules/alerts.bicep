metadata description = 'Metric alerts of the namespace: dead letters, a topic that fills up, throttled requests.'

param namespaceName string
param topicName string
param topicMegabytes int
param tags object

@description('Resource ids of the action groups that are notified; empty: the alerts are only shown in the portal.')
param actionGroupIds string[]

var actions = [for id in actionGroupIds: {
  actionGroupId: id
}]

var alerts = [
  {
    name: 'dead-letters'
    description: 'Messages were not processed. They stay, and count towards the size of their topic, until somebody removes them.'
    metric: 'DeadletteredMessages'
    aggregation: 'Maximum'
    threshold: 0
    entity: '*'
    severity: 2
  }
  {
    name: 'topic-size'
    description: 'The topic is half full: a subscription is not read, or its dead letters are not removed. A full topic refuses events.'
    metric: 'Size'
    aggregation: 'Maximum'
    threshold: topicMegabytes * 524288 // half of it, in bytes
    entity: topicName
    severity: 1
  }
  {
    name: 'throttled'
    description: 'The namespace is too small for what is sent. Requests are repeated, and events arrive late.'
    metric: 'ThrottledRequests'
    aggregation: 'Total'
    threshold: 0
    entity: '*'
    severity: 3
  }
]

resource bus 'Microsoft.ServiceBus/namespaces@2024-01-01' existing = {
  name: namespaceName
}

resource alert 'Microsoft.Insights/metricAlerts@2018-03-01' = [for one in alerts: {
  name: '${namespaceName}-${one.name}'
  location: 'global'
  tags: tags
  properties: {
    description: one.description
    severity: one.severity
    enabled: true
    scopes: [
      bus.id
    ]
    evaluationFrequency: 'PT5M'
    windowSize: 'PT15M'
    criteria: {
      'odata.type': 'Microsoft.Azure.Monitor.SingleResourceMultipleMetricCriteria'
      allOf: [
        {
          criterionType: 'StaticThresholdCriterion'
          name: one.name
          metricNamespace: 'Microsoft.ServiceBus/namespaces'
          metricName: one.metric
          timeAggregation: one.aggregation
          operator: 'GreaterThan'
          threshold: one.threshold
          dimensions: [
            {
              name: 'EntityName'
              operator: 'Include'
              values: [
                one.entity
              ]
            }
          ]
        }
      ]
    }
    autoMitigate: true
    actions: actions
  }
}]
